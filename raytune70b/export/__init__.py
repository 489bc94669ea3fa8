"""From a sharded checkpoint to a checked Hugging Face model folder: streamed, merged in fp32, compared with the live model, published whole."""
