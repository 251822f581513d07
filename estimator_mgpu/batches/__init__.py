"""What a batch is: its examples, shapes and arrays, and the end of the data.

- `batch`: which features and labels have examples, and how many there are.
- `unknown_ranks`: shapes that the input_fn doesn't tell, but the model_fn does.
- `feeding`: batches of arrays, for a predictor.
- `end_of_data`: a step that finds no batch writes nothing.
"""
