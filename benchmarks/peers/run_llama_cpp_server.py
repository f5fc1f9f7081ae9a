"""llama.cpp's OpenAI-compatible server (of llama-cpp-python) on a GGUF file.

Stands alone: it runs in an environment without this project. run_llama_cpp_server.py MODEL ALIAS PORT
"""

import sys

import llama_cpp.llama_cpp as lc
from llama_cpp.server.__main__ import main
from llama_cpp_batch import survives_tiles


def _without_tiles(model: str) -> None:
    """The server has no option for it."""
    plain = lc.llama_model_default_params

    def _params() -> lc.llama_model_params:
        params = plain()
        params.use_extra_bufts = False
        return params

    if not survives_tiles(model):
        sys.stderr.write("llama.cpp: tiles end its process here: they are off\n")
        lc.llama_model_default_params = _params


if __name__ == "__main__":
    path, alias, port = sys.argv[1:]
    lc.llama_backend_init()
    _without_tiles(path)
    sys.argv[1:] = ["--model", path, "--model_alias", alias, "--port", port, "--host", "127.0.0.1"]
    sys.argv += ["--n_ctx", "2048", "--n_threads", "2", "--interrupt_requests", "False"]
    main()
