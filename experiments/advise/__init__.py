"""``hvdcompress advise``: should a training be compressed at all, and how?"""
