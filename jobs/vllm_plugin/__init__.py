"""Plug-in that lets a policy choose how many drafted tokens vLLM verifies, request by request (docs/vllm.md)."""
