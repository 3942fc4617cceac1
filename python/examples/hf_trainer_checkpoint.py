"""Checkpoints of Hugging Face's Trainer. The lines of Feedline end with ``# feedline``.

    python hf_trainer_checkpoint.py [CORPUS] [--out=FOLDER]

Started again with the same folder it resumes, bit for bit. ``from_pretrained`` opens each step.
"""

import numpy
import torch
from demo_corpus import corpus_prefix, output_folder
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments

from feedline.transformers import Trainer, get_last_checkpoint  # feedline

steps, batch_size, length, out_dir = 20, 4, 64, output_folder()
tokens = numpy.fromfile(corpus_prefix() + ".bin", numpy.uint16)[: steps * batch_size * length]
rows = torch.from_numpy(tokens.astype(numpy.int64)).view(-1, length)
samples = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(n_positions=length, n_embd=32, n_layer=1, n_head=2))
arguments = TrainingArguments(
    out_dir,
    max_steps=steps,
    per_device_train_batch_size=batch_size,
    save_steps=10,
    logging_steps=5,
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=samples,
    async_save=True,  # feedline
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out_dir))
opened = AutoModelForCausalLM.from_pretrained(get_last_checkpoint(out_dir))
assert all(map(torch.equal, opened.state_dict().values(), model.state_dict().values()))
print(f"opened {get_last_checkpoint(out_dir)}")
