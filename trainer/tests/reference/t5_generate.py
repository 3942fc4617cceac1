"""What transformers' T5 v1.1 writes into the gaps of a text: an oracle of tests/it/generate.rs.

    python3 t5_generate.py ../golden/t5_generate        # torch 2.11, transformers 5.23

Teaches a small model for a few seconds to name each mark of a gap in a row that counts up, with the
number that is missing there. It learns the form and not the numbers. Saves it as Hugging Face does,
with what it writes of new rows.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

VOCAB, PAD, END = 61, 0, 1
OUT = Path(sys.argv[1])


def sample(start, step, gaps, length):
    """A row with two masked numbers, and the expected answer."""
    row = [2 + (start + i * step) % 50 for i in range(length)]
    answer = []
    for mark, gap in zip((60, 59), sorted(gaps)):
        answer += [mark, row[gap]]
        row[gap] = mark
    return row + [END], answer + [58, END]


def batch(count):
    rows = []
    length = int(torch.randint(7, 13, ()))
    for _ in range(count):
        start, step = int(torch.randint(50, ())), int(torch.randint(1, 4, ()))
        gaps = (1 + torch.randperm(length - 2)[:2]).tolist()
        rows.append(sample(start, step, gaps, length))
    return [torch.tensor(part) for part in zip(*rows)]


def main():
    torch.manual_seed(3)
    config = T5Config(vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                      num_decoder_layers=2, relative_attention_num_buckets=8,
                      relative_attention_max_distance=16, dropout_rate=0.0,
                      feed_forward_proj="gated-gelu", tie_word_embeddings=False,
                      pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD)
    model = T5ForConditionalGeneration(config)
    # transformers 5 ties the head of a new model whatever the config says.
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    optim = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    for step in range(300):
        optim.param_groups[0]["lr"] = 5e-3 * (1 - step / 300)
        ids, labels = batch(16)
        loss = model(ids, labels=labels).loss
        optim.zero_grad()
        loss.backward()
        optim.step()
    print(f"taught to a loss of {loss.item():.3f}")
    model.eval()
    OUT.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(OUT, safe_serialization=True)
    cases = []
    for start, step, gaps, length in [(3, 1, (2, 5), 9), (20, 2, (1, 8), 12), (41, 3, (4, 5), 10)]:
        prompt, _ = sample(start, step, gaps, length)
        ids = torch.tensor([prompt])
        for least in (0, 9):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=14, min_new_tokens=least)
            new = out[0, 1:].tolist()
            if new[-1] == END:
                new = new[:-1]
            cases.append({"prompt": prompt, "tokens_min": least, "tokens_max": 14, "tokens": new})
    (OUT / "expected.json").write_text(json.dumps(cases) + "\n")


main()
