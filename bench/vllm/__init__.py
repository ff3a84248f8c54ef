"""``moonpool bench vllm``: vLLM with the KV connector beside vLLM alone, its servers in turn."""
