"""``python -m streampack.integrations.lm_eval``: the command of lm-evaluation-harness, which knows our model class.

The harness has no entry point for model classes of other packages.
"""

from lm_eval.__main__ import cli_evaluate

import streampack.integrations.lm_eval  # noqa: F401  # registers the model class

if __name__ == "__main__":
    cli_evaluate()
