"""Elastic, exact fine-tuning of large language models on Ray."""

import logging

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # whoever imports peft: it misses a kernel of the Hugging Face hub that nothing here calls
