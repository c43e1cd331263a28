#!/usr/bin/env python3
"""llama.cpp for bench_cpu.py: run by a Python that has llama-cpp-python, it times what standard input asks for.

    llama_worker.py MODEL.gguf THREADS CONTEXT REQUESTS

Lines in: `prompt N` reads N tokens; `decode REQUESTS PROMPT NEW` decodes NEW tokens of each request behind a prompt of
PROMPT tokens, one step for all. Lines out: the seconds it took, sampling not included.
"""

from __future__ import annotations

import sys
import time

import llama_cpp as ll


class Worker:
    def __init__(self, path: str, threads: int, context: int, requests: int) -> None:
        ll.llama_backend_init()
        self._silence = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self._silence, None)
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * requests, requests
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.batch = ll.llama_batch_init(params.n_batch, 0, 1)
        self.most = params.n_batch

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One forward over (request, position, token, wanted) rows."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (request, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = request
        if ll.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        ll.llama_synchronize(self.context)

    def read(self, request: int, count: int) -> None:
        for start in range(0, count, self.most):
            end = min(start + self.most, count)
            self.step([(request, p, 100 + p % 997, p == count - 1) for p in range(start, end)])

    def prompt(self, count: int) -> float:
        self.clear()
        begun = time.perf_counter()
        self.read(0, count)
        return time.perf_counter() - begun

    def decode(self, requests: int, prompt: int, new: int) -> float:
        self.clear()
        for request in range(requests):
            self.read(request, prompt)
        begun = time.perf_counter()
        for position in range(prompt, prompt + new):
            self.step([(request, position, 100 + position % 997, True) for request in range(requests)])
        return time.perf_counter() - begun


def main() -> None:
    worker = Worker(sys.argv[1], *map(int, sys.argv[2:5]))
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(getattr(worker, what)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
