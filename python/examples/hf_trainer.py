"""Hugging Face's Trainer. The lines that read with Feedline end with ``# feedline``.

    python hf_trainer.py [CORPUS] [--out=FOLDER]

Started again with the same folder it resumes, and reads nothing of what it skips.
"""

from demo_corpus import corpus_prefix, output_folder
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from feedline.transformers import CausalLMDataset  # feedline

steps, batch_size, out_dir = 20, 4, output_folder()
data = {"sequence_length": 64, "num_samples": steps * batch_size}
samples = CausalLMDataset(corpus_prefix(), **data)  # feedline

model = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=1, n_head=2))
arguments = TrainingArguments(
    out_dir,
    max_steps=steps,
    per_device_train_batch_size=batch_size,
    save_steps=10,
    logging_steps=5,
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
    train_sampling_strategy="sequential",  # feedline
    remove_unused_columns=False,  # feedline
    dataloader_drop_last=True,  # feedline
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out_dir))
