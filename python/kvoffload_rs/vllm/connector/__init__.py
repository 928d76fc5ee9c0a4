"""`KvOffloadConnector`: vLLM's connector interface, with the state of both sides in Rust.

Follow one request: `base` is what vLLM calls, `scheduler` decides (in `_core.Requests`) what is
loaded and stored, `messages` is what travels between the processes, `worker` copies and reports.
`facts` reads the model's KV groups, `events` and `metrics` tell others what happened.
"""

from __future__ import annotations

from kvoffload_rs.vllm.connector.base import KvOffloadConnector

__all__ = ["KvOffloadConnector"]
