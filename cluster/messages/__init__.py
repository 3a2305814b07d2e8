"""What a message is before it travels and after: the model, its columns, keys, codecs and the choice of a queue."""
