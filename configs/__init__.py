"""One YAML file is one run; `streampack ls` lists them, `streampack cp NAME .` makes one yours."""
