"""Scripts to copy and change. Installed as `streampack_examples`: `python -m streampack_examples.chat_sft` runs one."""
