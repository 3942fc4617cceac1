"""What transformers and Megatron's own formulas say of a small GPT-2: the oracle of tests/it/eval.rs.

    python3 eval.py ../golden/eval        # torch 2.11, transformers 5.23, tokenizers 0.23

Makes a tokenizer and a model, teaches it the texts below for a few seconds, saves both as Hugging
Face does, and writes down perplexities, LAMBADA, greedy texts and what is left of logits by top-k
and top-p. The detokenizer and the windows are those of Megatron-LM's tasks/zeroshot_gpt.
"""

import json
import math
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SEQ, VOCAB, STRIDE = 32, 401, 8
END = "<|endoftext|>"
OUT = Path(sys.argv[1])

WIKITEXT = """ = Harbour of Lindau =

 The harbour of Lindau is a port on the southern shore of the lake . It was built in 1 @,@ 812 , and
 rebuilt by the railway from 1853 to 1856 ; the " old " harbour ( today the inner one ) lies to the east .

 = = Light = =

 The lighthouse is 33 @.@ 3 metres high , the southern @-@ most of its kind : a clock faces the town 's
 quay . Its keeper lived in the tower until 1936 . ' Lights on ' , said the log , every evening at dusk !
 Is it still lit ? It is : at 47 ° 32 ′ N 9 ° 41 ′ E , whenever a ship calls ( by radio [ or by hand ] ) .

 = = = Ships = = =

 N steamers carried the mail . The last of them , " Hohentwiel " , went out of service in 1962 ; her
 sister was broken up in 1 @,@ 964 . The sailors ' { many of them from the town } houses stand yet .
 The lion on the other side of the mouth was carved in 1856 from 50 tons of stone , it is 6 metres high .
"""

HOMES = {"fox": "barn", "otter": "river-bank", "heron": "boat-house", "badger": "meadow",
         "stork": "chimney", "weasel": "bell-tower"}


def stories(count):
    """Most end with the word that the animal tells."""
    dice = random.Random(7)
    for _ in range(count):
        animal, other = dice.sample(list(HOMES), 2)
        home = HOMES[animal] if dice.random() < 0.7 else dice.choice(list(HOMES.values()))
        yield (f"one day a {other} came by and asked the {animal} to come along . they walked for "
               f"an hour , and talked of the weather and of the other animals of the valley . then "
               f"it rained , so the {animal} went back to the {home}")


def detokenized(text):
    """Megatron's wikitext_detokenizer, rule by rule, one of them with its own mistake."""
    for rule in [
        ("s '", "s'"), (re.compile(r"/' [0-9]/"), r"/'[0-9]/"),
        (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
        (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
        (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"), (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
        (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"), (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
        (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
        ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"),
        (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
    ]:
        text = text.replace(*rule) if isinstance(rule[0], str) else rule[0].sub(rule[1], text)
    return text


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet,
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
    assert len(fast) == VOCAB
    return fast


def make_model(streams):
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_layer=2, n_head=2,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    flat = torch.tensor([token for stream in streams for token in stream])
    for step in range(1000):
        optim.param_groups[0]["lr"] = 1e-2 * (1 - step / 1000)
        starts = torch.randint(len(flat) - SEQ, (16,))
        ids = torch.stack([flat[start : start + SEQ] for start in starts])
        loss = model(ids, labels=ids).loss
        optim.zero_grad()
        loss.backward()
        optim.step()
    print(f"taught to a loss of {loss.item():.3f}")
    return model.eval()


@torch.no_grad()
def said(model, ids):
    """The loss of each token but the first, and whether it is the likeliest."""
    logits = model(torch.tensor([ids[:-1]])).logits[0]
    expected_ids = torch.tensor(ids[1:])
    losses = -torch.log_softmax(logits, -1).gather(1, expected_ids[:, None])[:, 0].double()
    return losses.tolist(), (logits.argmax(-1) == expected_ids).tolist()


def windowed(model, ids, stride):
    """Megatron's _LMDataset, which counts each token once."""
    total, first = 0.0, True
    count = max(math.ceil(max(len(ids) - 1 - stride, 0) / stride) + 1, 1)
    counted = 0
    for start in range(0, count * stride, stride):
        window = ids[start : start + SEQ + 1]
        if len(window) < 2:
            break
        losses = said(model, window)[0]
        losses += [0.0] * (SEQ - len(losses))
        real = [1] * (len(window) - 1) + [0] * (SEQ + 1 - len(window))
        if not first and stride != SEQ:
            losses, real = losses[-stride:], real[-stride:]
        total += sum(losses)
        counted += sum(real)
        first = False
    assert counted == len(ids) - 1
    return total


def wikitext(model, encode):
    ids = encode(detokenized(WIKITEXT))
    words = len(WIKITEXT.strip().split(" "))
    ratio = (len(ids) - 1) / (words - 1)
    result = {"words": words, "tokens": len(ids) - 1, "token_ratio": ratio}
    for stride in (STRIDE, SEQ):
        loss = windowed(model, ids, stride) / (len(ids) - 1)
        result[f"stride_{stride}"] = {"loss": loss, "perplexity": math.exp(loss),
                                      "adjusted": math.exp(loss * ratio)}
    return result


def lambada(model, encode, texts):
    words, tokens, nll = 0, 0, 0.0
    for text in texts:
        last = text.split()[-1]
        context = encode(text[: text.rfind(last)].strip())
        label = encode(" " + last)
        losses, right = said(model, (context + label)[-SEQ - 1 :])
        words += all(right[-len(label) :])
        nll += sum(losses[-len(label) :])
        losses, right = said(model, encode(text)[-SEQ - 1 :])
        tokens += right[-1]
    return {"examples": len(texts), "last_word": words, "last_token": tokens,
            "word_perplexity": math.exp(nll / len(texts))}


def greedy(model, encode, prompts):
    result = []
    for prompt in prompts:
        ids = torch.tensor([encode(prompt)])
        for least in (0, 12):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_length=SEQ, min_new_tokens=least, pad_token_id=0)
            new = out[0, ids.shape[1] :].tolist()
            ended = new[-1] == 0
            result.append({"prompt": prompt, "tokens_min": least, "tokens_max": SEQ - ids.shape[1],
                           "tokens": new[:-1] if ended else new})
    return result


def filtered(model, encode):
    """The candidates that HF's warpers leave, with their probabilities."""
    logits = model(torch.tensor([encode("the fox went back to the")])).logits[0, -1:].detach()
    result = {"logits": logits[0].tolist(), "cases": []}
    for temperature, k, p in [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.5),
                              (1.3, 40, 0.9), (0.5, 7, 0.3), (2.0, 0, 0.95), (1.0, 1, 0.9)]:
        scores = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        scores = TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        probs = torch.softmax(scores.double(), -1)[0]
        kept = probs.nonzero()[:, 0].tolist()
        result["cases"].append({"temperature": temperature, "top_k": k, "top_p": p, "kept": kept,
                                "probs": [probs[token].item() for token in kept]})
    return result


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    texts = list(stories(72))
    tokenizer = make_tokenizer([detokenized(WIKITEXT), *texts])
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    learned = [encode(text) + [0] for text in [detokenized(WIKITEXT), *texts[:48]]]
    model = make_model(learned)
    model.save_pretrained(OUT, safe_serialization=True)
    tokenizer.save_pretrained(OUT)
    (OUT / "wikitext.txt").write_text(WIKITEXT)
    with open(OUT / "lambada.jsonl", "w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts[48:72])

    documents = [encode(text) + [0] for text in texts[:10]]
    second_half = [token for document in documents[5:] for token in document]
    loss = windowed(model, second_half, SEQ)
    result = {
        "seq": SEQ, "vocab": VOCAB, "detokenized": detokenized(WIKITEXT),
        "wikitext": wikitext(model, encode),
        "lambada": lambada(model, encode, texts[48:72]),
        "corpus": {"documents": documents, "tokens": len(second_half) - 1,
                   "loss": loss / (len(second_half) - 1)},
        "greedy": greedy(model, encode, ["so the fox went back to the", "The harbour of", "one day a stork"]),
        "filtered": filtered(model, encode),
    }
    (OUT / "expected.json").write_text(json.dumps(result) + "\n")
    for name in ("wikitext", "lambada", "corpus"):
        print(name, {key: value for key, value in result[name].items() if key != "documents"})


main()
