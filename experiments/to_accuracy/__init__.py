"""Time to accuracy: how many seconds of training does each contender need to reach a target?

``python -m experiments time-to-accuracy train`` measures accuracy over the steps, once per contender and seed; ``time``
measures milliseconds per step over emulated links, contenders in turns; ``report`` multiplies both.
"""
