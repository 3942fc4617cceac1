"""GPT-2's loss and gradients in float64 with nothing but numpy, written from its paper and formulas.

    python3 gpt2.py ../golden/gpt2.safetensors

The oracle of tests/it/model/mod.rs. The backward pass is written out by hand and checked against finite
differences before anything is saved. Weights are a formula of their place, so that the test makes
the same ones and only the results are stored: logits, the loss, and every gradient.
"""

import json
import struct
import sys

import numpy as np

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ, ROWS = 2, 16, 2, 48, 53, 12, 3


def names():
    """Every parameter with its shape, as Hugging Face's GPT2LMHeadModel has them."""
    yield "transformer.wte.weight", (VOCAB, HIDDEN)
    yield "transformer.wpe.weight", (SEQ, HIDDEN)
    for i in range(LAYERS):
        h = f"transformer.h.{i}."
        yield h + "ln_1.weight", (HIDDEN,)
        yield h + "ln_1.bias", (HIDDEN,)
        yield h + "attn.c_attn.weight", (HIDDEN, 3 * HIDDEN)
        yield h + "attn.c_attn.bias", (3 * HIDDEN,)
        yield h + "attn.c_proj.weight", (HIDDEN, HIDDEN)
        yield h + "attn.c_proj.bias", (HIDDEN,)
        yield h + "ln_2.weight", (HIDDEN,)
        yield h + "ln_2.bias", (HIDDEN,)
        yield h + "mlp.c_fc.weight", (HIDDEN, FFN)
        yield h + "mlp.c_fc.bias", (FFN,)
        yield h + "mlp.c_proj.weight", (FFN, HIDDEN)
        yield h + "mlp.c_proj.bias", (HIDDEN,)
    yield "transformer.ln_f.weight", (HIDDEN,)
    yield "transformer.ln_f.bias", (HIDDEN,)


def value(name, shape):
    """Spread over [-0.5, 0.5), exact in float32; gains around 1."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(name))
    place = np.arange(np.prod(shape), dtype=np.uint64) * 2654435761 + seed * 40503
    unit = (place % 2**32 >> 16).astype(np.float64) / 65536 - 0.5
    is_gain = ".ln_" in name and name.endswith("weight")
    return (unit * 0.25 + 1 if is_gain else unit).reshape(shape)


def batch():
    place = np.arange(ROWS * SEQ)
    tokens = (place * 31 + 7) % VOCAB
    labels = (place * 17 + 3) % VOCAB
    mask = (place % 5 != 4).astype(np.float64)
    return (a.reshape(ROWS, SEQ) for a in (tokens, labels, mask))


def norm(x, gain, bias):
    mean = x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    hat = (x - mean) * scale
    return hat * gain + bias, (hat, scale, gain)


def norm_back(dy, saved):
    hat, scale, gain = saved
    dhat = dy * gain
    dx = scale * (dhat - dhat.mean(-1, keepdims=True) - hat * (dhat * hat).mean(-1, keepdims=True))
    return dx, (dy * hat).sum((0, 1)), dy.sum((0, 1))


C = np.sqrt(2 / np.pi)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(C * (x + 0.044715 * x**3)))


def gelu_back(dy, x):
    t = np.tanh(C * (x + 0.044715 * x**3))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * C * (1 + 3 * 0.044715 * x**2))


def heads(x):
    return x.reshape(ROWS, SEQ, HEADS, HIDDEN // HEADS).transpose(0, 2, 1, 3)


def unheads(x):
    return x.transpose(0, 2, 1, 3).reshape(ROWS, SEQ, HIDDEN)


def forward(p):
    tokens, labels, mask = batch()
    weight = mask / mask.sum()
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"]
    saved = []
    future = np.triu(np.full((SEQ, SEQ), -np.inf), 1)
    for i in range(LAYERS):
        w = lambda part: p[f"transformer.h.{i}.{part}"]
        a, n1 = norm(x, w("ln_1.weight"), w("ln_1.bias"))
        qkv = a @ w("attn.c_attn.weight") + w("attn.c_attn.bias")
        q, k, v = (heads(part) for part in np.split(qkv, 3, -1))
        s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(HIDDEN // HEADS) + future
        e = np.exp(s - s.max(-1, keepdims=True))
        att = e / e.sum(-1, keepdims=True)
        y = unheads(att @ v)
        x = x + y @ w("attn.c_proj.weight") + w("attn.c_proj.bias")
        m, n2 = norm(x, w("ln_2.weight"), w("ln_2.bias"))
        f = m @ w("mlp.c_fc.weight") + w("mlp.c_fc.bias")
        g = gelu(f)
        x = x + g @ w("mlp.c_proj.weight") + w("mlp.c_proj.bias")
        saved.append((a, n1, q, k, v, att, y, m, n2, f, g))
    h, nf = norm(x, p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
    logits = h @ p["transformer.wte.weight"].T
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    loss = (weight * (log_sum - picked)).sum()
    return loss, logits, (tokens, labels, weight, saved, h, nf, log_sum)


def backward(p, logits, rest):
    tokens, labels, weight, saved, h, nf, log_sum = rest
    grad = {name: np.zeros(shape) for name, shape in names()}
    dlogits = np.exp(logits - log_sum[..., None])
    np.put_along_axis(dlogits, labels[..., None],
                      np.take_along_axis(dlogits, labels[..., None], -1) - 1, -1)
    dlogits *= weight[..., None]
    wte = grad["transformer.wte.weight"]
    wte += np.einsum("rsv,rsh->vh", dlogits, h)
    dh = dlogits @ p["transformer.wte.weight"]
    dx, grad["transformer.ln_f.weight"], grad["transformer.ln_f.bias"] = norm_back(dh, nf)
    for i in reversed(range(LAYERS)):
        key = lambda part: f"transformer.h.{i}.{part}"
        a, n1, q, k, v, att, y, m, n2, f, g = saved[i]

        def linear(name, x, dy):
            grad[key(name + ".weight")] = np.einsum("rsi,rso->io", x, dy)
            grad[key(name + ".bias")] = dy.sum((0, 1))
            return dy @ p[key(name + ".weight")].T

        df = gelu_back(linear("mlp.c_proj", g, dx), f)
        dm = linear("mlp.c_fc", m, df)
        d, grad[key("ln_2.weight")], grad[key("ln_2.bias")] = norm_back(dm, n2)
        dx = dx + d
        dy = heads(linear("attn.c_proj", y, dx))
        dv = att.transpose(0, 1, 3, 2) @ dy
        datt = dy @ v.transpose(0, 1, 3, 2)
        ds = att * (datt - (datt * att).sum(-1, keepdims=True)) / np.sqrt(HIDDEN // HEADS)
        dq, dk = ds @ k, ds.transpose(0, 1, 3, 2) @ q
        dqkv = np.concatenate([unheads(part) for part in (dq, dk, dv)], -1)
        da = linear("attn.c_attn", a, dqkv)
        d, grad[key("ln_1.weight")], grad[key("ln_1.bias")] = norm_back(da, n1)
        dx = dx + d
    np.add.at(wte, tokens, dx)
    grad["transformer.wpe.weight"] = dx.sum(0)
    return grad


def check(p, grad):
    """Moves each parameter a little along a direction of its own: the loss must follow."""
    rng = np.random.default_rng(0)
    for name, shape in names():
        direction = rng.standard_normal(shape)
        step = 1e-5
        sides = [forward({**p, name: p[name] + sign * step * direction})[0] for sign in (1, -1)]
        slope = (sides[0] - sides[1]) / (2 * step)
        expected = (grad[name] * direction).sum()
        assert abs(slope - expected) < 1e-8 + 1e-6 * abs(expected), (name, slope, expected)


def save(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        body = np.ascontiguousarray(array, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


def main():
    p = {name: value(name, shape) for name, shape in names()}
    loss, logits, rest = forward(p)
    grad = backward(p, logits, rest)
    check(p, grad)
    save(sys.argv[1], {"loss": np.array([loss]), "logits": logits, **grad})
    print(f"loss {loss:.6f}, {len(grad)} gradients agree with finite differences")


main()
