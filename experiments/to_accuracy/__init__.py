"""Time to accuracy: how many seconds of training does each contender need to reach a target?

    python -m experiments.to_accuracy train    accuracy over the steps, once per contender and seed
    python -m experiments.to_accuracy time     milliseconds per step over emulated links, contenders in turns
    python -m experiments.to_accuracy report   steps x milliseconds = seconds to the target

Accuracy per step does not depend on the link, so it is measured without one. ``train --rate`` measures both at once,
over emulated hosts, and proves that.
"""
