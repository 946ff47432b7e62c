"""Training runs, one file each; installed as `streampack_recipes`: torchtune owns the name `recipes`."""
