"""The real vLLM scheduler and connector without a GPU or a model: only the forward pass is fake.

Runs in a process of its own, with one unpacked vLLM release first on the path (see ``drive.py``).
"""
