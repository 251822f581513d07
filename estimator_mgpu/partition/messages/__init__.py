"""What devices send each other: which values share a message, and which are cut into slices.

In: the values that towers need from each other, with their bytes and devices. Out: packs, slices,
and the ops that exchange them. `towers` has these made.

- `packing`: small values share messages, gradients those of one call of an optimizer.
- `slices`: large ones are cut. `trees`: which device hands a slice on to which others; `exchange`:
  the ops that do.
"""
