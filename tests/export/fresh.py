"""A fresh process that knows nothing but transformers: loads model folders and writes their logits.

usage: python fresh.py INPUT.pt OUTPUT.pt FOLDER ...
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
batch, found = torch.load(sys.argv[1]), {}
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Qui est visé ?"}], add_generation_prompt=True, tokenize=False)
    with torch.no_grad():
        found[folder] = (model(**batch, use_cache=False).logits, text, model.generate(batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False))
torch.save(found, sys.argv[2])
