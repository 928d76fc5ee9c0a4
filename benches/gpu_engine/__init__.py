"""The whole engine on a GPU: time to the first token, throughput, equal tokens, and starts.

python benches/gpu_engine {ttft,throughput,tokens,starts} --help
"""
