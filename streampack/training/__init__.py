"""Functions and classes that recipes call; they never call a recipe."""

import logging

# Before torchtune is imported: torchao 0.15 has no C++ extensions for torch 2.13, which only quantization would want,
# and says so in each process.
logging.getLogger("torchao").setLevel(logging.ERROR)
