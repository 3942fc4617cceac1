"""Megatron-core's data. The lines that read with Feedline end with ``# feedline``.

    python megatron_core.py [CORPUS] [--dataloader-type=external]

The functions are those that a ``pretrain_gpt.py`` hands to Megatron-LM. With ``external`` pass to
Megatron-LM ``--dataloader-type external --no-create-attention-mask-in-dataloader`` too.
"""

import sys
from types import SimpleNamespace

import torch
from demo_corpus import corpus_prefix, output_folder
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.rerun_state_machine import RerunDataIterator
from tiny_model import TinyGPT

import feedline.megatron  # feedline


class Tokenizer:  # in Megatron-LM: get_tokenizer()
    vocab_size, eod = 50257, 50256
    unique_identifiers = {"class": "Tokenizer", "name": "gpt2"}


args = SimpleNamespace(
    data_path=[corpus_prefix()], data_args_path=None, split="95,5,0", seq_length=64, seed=1234,
    data_cache_path=output_folder(), micro_batch_size=4, dataloader_type="single",
    consumed_train_samples=0, consumed_valid_samples=0, eod_mask_loss=False,
    reset_position_ids=False, reset_attention_mask=False,
)
if "--dataloader-type=external" in sys.argv:
    args.dataloader_type = "external"


def train_valid_test_datasets_provider(num_samples):
    if args.dataloader_type == "external":
        return feedline.megatron.external_loaders(args, num_samples)  # feedline
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split=args.split,
        blend=(args.data_path, None), path_to_cache=args.data_cache_path,
        tokenizer=Tokenizer(), reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    dataset_type = feedline.megatron.GPTDataset  # feedline
    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, lambda: True, config).build()


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = torch.nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


# What Megatron-LM does around these functions.
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
parallel_state.initialize_model_parallel()
train, _, _ = train_valid_test_datasets_provider([80, 8, 0])
if args.dataloader_type == "single":
    rows = [list(range(first, first + 4)) for first in range(args.consumed_train_samples, 80, 4)]
    train = iter(torch.utils.data.DataLoader(train, batch_sampler=rows))
data_iterator = RerunDataIterator(train)
torch.manual_seed(1)
model = TinyGPT(length=args.seq_length)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for iteration in range(1, 21):
    loss = forward_step(data_iterator, model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"iteration {iteration}: lm loss {loss.item():.6f}")
torch.distributed.destroy_process_group()
