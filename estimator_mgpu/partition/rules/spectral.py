"""Fourier transforms: of the last dimensions, each vector or matrix by itself."""

from __future__ import annotations

from estimator_mgpu.partition.rules.notation import Rule, table

_RULES: dict[str, Rule] = {
    'FFT IFFT': 'S_ -> S_',
    'FFT2D IFFT2D': 'S__ -> S__',
    # The second input is the length of the transform.
    'IRFFT RFFT': 'S_ * -> S_',
    'IRFFT2D RFFT2D': 'S__ * -> S__',
}
RULES = table(_RULES)
