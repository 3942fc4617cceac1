//! Small corpora and vocabularies of every objective except language modeling, and runs on them.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use indexed::{Builder, Dtype};
use preprocess::objective::{SpanConfig, Triple, corrupt};
use serde_json::Value;
use storage::Key;
use trainer::config::Config;

use crate::common::Lab;
use crate::samples::{Random, flag, number};

/// Ids of the vocabularies of runs; the last thirty are sentinels.
pub const VOCAB: u32 = 200;

/// A model and its training data.
#[derive(Clone, Copy)]
pub struct Task {
    pub name: &'static str,
    keys: &'static [(&'static str, &'static str)],
    corpus: &'static str,
    tokenizer: &'static str,
    make: fn(&Lab),
    /// Ids that its tokenizer has.
    pub special: &'static [(&'static str, u64)],
}

pub const SPANS: Task = Task {
    name: "spans",
    keys: &[("model.family", "'t5'"), ("model.seq_len", "32"), ("model.dec_len", "16")],
    corpus: "sentences",
    tokenizer: "wordpiece:words.txt",
    make: sentences,
    special: &[("bos", 4), ("eos", 5), ("eod", 7), ("sentinels.0", 170), ("sentinels.1", 199)],
};

pub const ENCDEC: Task = Task {
    name: "encdec",
    keys: &[
        ("model.family", "'t5'"),
        ("model.seq_len", "24"),
        ("model.dec_len", "16"),
        ("data.objective", "'encdec'"),
        ("data.reset_at_document", "true"),
    ],
    corpus: "triple",
    tokenizer: "encdec:tokens.txt",
    make: triple,
    special: &[("bos", 1), ("pad", 5), ("eod", 7), ("sentinels.0", 170), ("sentinels.1", 199)],
};

pub const MLM: Task = Task {
    name: "mlm",
    keys: &[("model.family", "'bert'"), ("model.seq_len", "32")],
    corpus: "sentences",
    tokenizer: "wordpiece:words.txt",
    make: sentences,
    special: &[("cls", 1), ("sep", 2), ("mask", 3), ("pad", 0)],
};

/// Eight micro-batches a step, which four replicas divide.
const BATCH: [(&str, &str); 6] = [
    ("batch.global", "16"),
    ("batch.micro", "2"),
    ("run.budget", "{ steps = 24 }"),
    ("checkpoint.every.steps", "3"),
    ("model.hidden", "32"),
    ("model.vocab", "200"),
];

impl Task {
    /// Writes the config of a run, and its corpus if it does not exist.
    pub fn config(self, lab: &Lab, run: &str, keys: &[(&str, &str)]) -> PathBuf {
        (self.make)(lab);
        let (kind, file) = self.tokenizer.split_once(':').unwrap();
        let train = format!("'{}'", lab.path(self.corpus).display());
        let tokenizer = format!("'{kind}:{}'", lab.path(file).display());
        let own = [("data.train", &*train), ("data.tokenizer", &*tokenizer)];
        lab.config(run, &[&BATCH, self.keys, &own[..], keys].concat())
    }

    pub fn load(self, lab: &Lab, run: &str, keys: &[(&str, &str)]) -> Config {
        Config::load(self.config(lab, run, keys).to_str().unwrap(), &[]).unwrap()
    }
}

/// Predictable tokens, so that there is something to learn.
fn text(document: u32, first: u32, len: u32) -> impl Iterator<Item = u32> {
    (0..len).map(move |i| 20 + (first + i * (1 + document % 2)) % 40)
}

fn sentences(lab: &Lab) {
    write_words(lab, "words.txt", VOCAB);
    write(lab, "sentences", |builder| {
        for document in 0..300 {
            for sentence in 0..2 + document % 5 {
                let text = text(document, document % 7 + sentence, 4 + (document + sentence) % 8);
                builder.add_sequence(&text.collect::<Vec<_>>()).unwrap();
            }
            builder.end_document().unwrap();
        }
    });
}

fn triple(lab: &Lab) {
    write_tokens(lab, "tokens.txt", VOCAB, VOCAB - 30);
    let (spans, mut triple) = (SpanConfig::new(VOCAB), Triple::default());
    let mut parts = [Vec::new(), Vec::new(), Vec::new()];
    for document in 0..300 {
        let text = text(document, document % 7, 30 + document % 41);
        corrupt(&text.chain([7]).collect::<Vec<_>>(), document.into(), &spans, &mut triple)
            .unwrap();
        parts[0].push(triple.context.clone());
        parts[1].push(triple.target.clone());
        parts[2].push(triple.offsets.clone());
    }
    write_triple(lab, "triple", parts);
}

fn write_triple(lab: &Lab, name: &str, parts: [Vec<Vec<u32>>; 3]) {
    for (part, documents) in ["context", "target", "target_offset"].into_iter().zip(parts) {
        write(lab, &format!("{name}_{part}"), |builder| {
            for document in &documents {
                builder.add_sequence(document).unwrap();
                builder.end_document().unwrap();
            }
        });
    }
}

fn write(lab: &Lab, name: &str, fill: impl FnOnce(&mut Builder)) {
    if lab.path(&format!("{name}.idx")).exists() {
        return;
    }
    let store = storage::open_url(lab.path("").to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new(name).unwrap(), Dtype::U16).unwrap();
    fill(&mut builder);
    builder.finish().unwrap();
}

/// A vocabulary of BERT's kind: ids from 10 on that 3 divides are continuations of words, the last
/// thirty are sentinels.
fn write_words(lab: &Lab, name: &str, count: u32) {
    let mut text = "[PAD]\n[CLS]\n[SEP]\n[MASK]\n[BOS]\n[EOS]\n[UNK]\n[EOD]\n".to_owned();
    for id in 8..count {
        match id.checked_sub(count - 30) {
            Some(nth) => writeln!(text, "<extra_id_{nth}>").unwrap(),
            None if id >= 10 && id % 3 == 0 => writeln!(text, "##{id}").unwrap(),
            None => writeln!(text, "{id}").unwrap(),
        }
    }
    fs::write(lab.path(name), text).unwrap();
}

/// A vocabulary of CPM-2's kind.
fn write_tokens(lab: &Lab, name: &str, count: u32, first_sentinel: u32) {
    let mut text = "<unk>\n<s>\n</s>\n3\n4\n<pad>\n6\n<eod>\n".to_owned();
    for id in 8..count {
        match id.checked_sub(first_sentinel) {
            Some(nth) => writeln!(text, "<s_{nth}>").unwrap(),
            None => writeln!(text, "{id}").unwrap(),
        }
    }
    fs::write(lab.path(name), text).unwrap();
}

/// The config of a golden case, whose corpus and vocabulary are in the lab.
pub type Golden = fn(&Lab, &Value) -> Config;

fn golden(lab: &Lab, corpus: &str, tokenizer: (&str, &str), keys: &str) -> Config {
    let (kind, file) = tokenizer;
    let text = format!(
        "batch = {{ global = 1, micro = 1 }}
         eval = {{ every = 0 }}
         optim = {{ lr = {{ peak = 0.001 }} }}
         run.dir = 'unused'
         model.layers = 1
         model.hidden = 8
         model.heads = 1
         data.split = '100,0,0'
         data.train = '{}'
         data.tokenizer = '{kind}:{}'
         {keys}",
        lab.path(corpus).display(),
        lab.path(file).display()
    );
    Config::from_toml("golden", &text).unwrap()
}

/// The corpus of `megatron_samples.py`: 300 documents of up to 8 sentences of up to 29 tokens.
fn golden_masked(lab: &Lab, case: &Value, model: &str) -> Config {
    write_words(lab, "golden.txt", 400);
    write(lab, "golden", |builder| {
        let mut random = Random(2);
        for _ in 0..300 {
            for _ in 0..=random.below(8) {
                let len = random.below(30);
                let tokens: Vec<u32> = (0..len).map(|_| random.below(370) as u32).collect();
                builder.add_sequence(&tokens).unwrap();
            }
            builder.end_document().unwrap();
        }
    });
    let settings = &case["settings"];
    let lengths = match (
        flag(settings, "masking_use_geometric_distribution"),
        flag(settings, "masking_use_longer_ngrams"),
    ) {
        (true, _) => "geometric",
        (_, true) => "longer-first",
        _ => "shorter-first",
    };
    let keys = format!(
        "run.budget = {{ samples = 1500 }}
         run.seed = {}
         model.vocab = 400
         model.seq_len = {}
         data.mask_prob = {}
         data.mask_ngram_max = {}
         data.mask_full_words = {}
         data.mask_lengths = '{lengths}'
         data.special.pad = {}
         {model}",
        number(settings, "random_seed"),
        number(settings, "sequence_length"),
        settings["masking_probability"],
        number(settings, "masking_max_ngram"),
        flag(settings, "masking_do_full_word"),
        number(settings, "pad"),
    );
    golden(lab, "golden", ("wordpiece", "golden.txt"), &keys)
}

pub fn golden_bert(lab: &Lab, case: &Value) -> Config {
    let order = flag(&case["settings"], "classification_head");
    golden_masked(lab, case, &format!("model.family = 'bert'\ndata.sentence_order = {order}"))
}

pub fn golden_t5(lab: &Lab, case: &Value) -> Config {
    let dec_len = number(&case["settings"], "sequence_length_decoder");
    golden_masked(lab, case, &format!("model.family = 't5'\nmodel.dec_len = {dec_len}"))
}

/// The documents of `cpm2_samples.py`: of 2 to 25 spans that are kept and as many that are not.
pub fn golden_cpm2(lab: &Lab, case: &Value) -> Config {
    const VOCAB: u32 = 1000;
    write_tokens(lab, "golden.txt", VOCAB, 810);
    let (mut parts, mut random) = ([Vec::new(), Vec::new(), Vec::new()], Random(3));
    for _ in 0..150 {
        let (mut context, mut target, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        let spans = 2 + random.below(24) as u32;
        for nth in 0..spans {
            let kept = 1 + random.below(8);
            context.extend((0..kept).map(|_| 20 + random.below(780) as u32));
            context.push(VOCAB + nth);
            let start = target.len() as u32;
            target.push(VOCAB + nth);
            let noise = 1 + random.below(5);
            target.extend((0..noise).map(|_| 20 + random.below(780) as u32));
            target.extend((nth + 1 == spans).then_some(7));
            offsets.extend([start, target.len() as u32 - start]);
        }
        for (part, tokens) in parts.iter_mut().zip([context, target, offsets]) {
            part.push(tokens);
        }
    }
    write_triple(lab, "golden", parts);
    let settings = &case["settings"];
    let keys = format!(
        "run.budget = {{ samples = {} }}
         model.family = 't5'
         model.vocab = {VOCAB}
         model.seq_len = {}
         model.dec_len = {}
         data.objective = 'encdec'
         data.reset_at_document = {}",
        case["samples"],
        number(settings, "encoder_len"),
        number(settings, "decoder_len"),
        flag(settings, "reset"),
    );
    golden(lab, "golden", ("encdec", "golden.txt"), &keys)
}
