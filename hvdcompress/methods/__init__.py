"""The methods: one file = one paper; the file's name is its id in plans."""
