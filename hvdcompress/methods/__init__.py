"""The methods, one file per paper. The file's name is the method's id in plans.

Notation, the same in every file: n elements per tensor, k of them sent, p ranks (the world), g a gradient,
x = g + residual what a method is given, Σ a sum over ranks, ĝ the reduced gradient.
"""
