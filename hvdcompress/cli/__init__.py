"""The command ``hvdcompress``; it needs the extra ``cli``.

app has the commands and their options, doctor checks the installation, catalogue makes documentation and plans of the
methods' classes, advise measures whether a training gains by compression.
"""
