//! Configs that must be read, and configs that must be refused, each by the name of the key.

use std::fs;
use std::path::Path;
use std::time::Duration;

use recipe::config::{Budget, Config, Length, LoadFrom, LrStyle, ResumeEffect, Warmup};

const SMALL: &str = r#"
[run]
dir = "runs/small"
budget = { steps = 800 }
[model]
layers = 4
hidden = 128
heads = 4
vocab = 50257
seq_len = 64
[data]
train = "data/text_document"
[batch]
global = 16
micro = 4
[optim.lr]
peak = 1e-3
"#;

fn read(text: &str) -> Result<Config, String> {
    Config::from_toml("c.toml", text).map_err(|error| error.to_string())
}

/// Reads the small config from a file with overrides.
fn set(sets: &[&str]) -> Result<Config, String> {
    let folder = tempfile::tempdir().expect("make a folder");
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let file = write(folder.path(), "c.toml", SMALL);
    Config::load(&file, &sets).map_err(|error| error.to_string())
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("folder/name")).expect("make a folder");
    fs::write(&path, text).expect("write a config");
    path.to_str().expect("a UTF-8 path").to_owned()
}

#[test]
fn defaults_are_what_the_documentation_says() {
    let config = read(SMALL).unwrap();
    assert_eq!(config.run.seed, 1234);
    assert_eq!(config.run.budget, Budget::Steps(800));
    assert_eq!(config.model.ffn(), 512);
    assert_eq!(config.model.padded_vocab(), 50304);
    assert_eq!((config.model.init.std, config.model.init.scaled_output), (0.02, true));
    assert_eq!(config.data.train.len(), 1);
    assert_eq!(config.data.train[0].path, "data/text_document");
    assert_eq!(config.data.split.0, "949,50,1");
    assert_eq!((config.data.tokenizer.as_str(), config.data.prefetch_batches), ("gpt2", 8));
    assert_eq!(config.batch.micro_batches(), 4);
    assert_eq!((config.optim.betas, config.optim.eps), ([0.9, 0.95], 1e-8));
    assert_eq!((config.optim.weight_decay, config.optim.clip), (0.1, 1.0));
    assert_eq!((config.optim.lr.style, config.optim.lr.floor), (LrStyle::Cosine, 0.0));
    assert_eq!((config.lr_decay_samples(), config.lr_warmup_samples()), (12_800, 128));
    assert_eq!(config.checkpoint_dir(), "runs/small/ckpt");
    assert_eq!((config.checkpoint.every.steps, config.checkpoint.keep.last), (1000, 3));
    assert_eq!(config.checkpoint.load, LoadFrom::Auto);
    assert_eq!((config.eval.every, config.eval.iters), (1000, 10));
    assert_eq!((config.log.every, config.log.jsonl, config.log.tensorboard), (10, true, true));
    assert_eq!(config.cache_dir(), format!("{}/cache/GPTDataset_indices", config.corpus()));
    assert_eq!(config.data.local_cache, None);
}

/// The options of a URL are at its end: a name below it is not.
#[test]
fn default_folders_are_below_the_path_of_a_url() {
    let with = |train: &str, sets: &[&str]| {
        let text = SMALL.replace("data/text_document", train);
        let folder = tempfile::tempdir().unwrap();
        let sets: Vec<_> = sets.iter().map(|set| (*set).to_owned()).collect();
        Config::load(&write(folder.path(), "run.toml", &text), &sets)
    };
    for (train, below) in [
        ("s3://b/c?endpoint=http://h:1", "s3://b/c/cache/GPTDataset_indices?endpoint=http://h:1"),
        ("s3://b/c/?depth=16", "s3://b/c/cache/GPTDataset_indices?depth=16"),
        ("file:/d/c?direct=off", "file:/d/c/cache/GPTDataset_indices?direct=off"),
        ("/d/c?direct=off", "/d/c?direct=off/cache/GPTDataset_indices"),
    ] {
        let config = with(train, &[]).unwrap();
        assert_eq!(config.cache_dir(), below);
        assert_eq!(config.resolved().data.cache_dir.as_deref(), Some(below));
    }
    let quiet = ["log.jsonl=false", "log.tensorboard=false"];
    let of_run = |dir: &str, more: &[&str]| with("c", &[&[dir][..], more].concat());
    for (dir, ckpt) in [
        ("s3://b/run?endpoint=http://h:1", "s3://b/run/ckpt?endpoint=http://h:1"),
        ("s3://b/run/?tries=2", "s3://b/run/ckpt?tries=2"),
    ] {
        let config = of_run(&format!("run.dir={dir}"), &quiet).unwrap();
        assert_eq!(config.checkpoint_dir(), ckpt);
    }
    let config = of_run("run.dir=file:/d/run?direct=off", &[]).unwrap();
    assert_eq!(config.checkpoint_dir(), "file:/d/run/ckpt?direct=off");
    assert_eq!(config.log_dir(), Path::new("/d/run"));
}

#[test]
fn logs_of_a_run_are_not_in_a_bucket() {
    for log in ["log.jsonl=true", "log.tensorboard=true", "log.timers=trace"] {
        let quiet = ["run.dir=s3://b/run?tries=2", "log.jsonl=false", "log.tensorboard=false"];
        let sets: Vec<_> = quiet.into_iter().chain([log]).map(str::to_owned).collect();
        let folder = tempfile::tempdir().unwrap();
        let error = Config::load(&write(folder.path(), "run.toml", SMALL), &sets).unwrap_err();
        let expected = "run.dir: expected a path, because the logs are files, found \
                        s3://b/run?tries=2 (hint: set checkpoint.dir to the URL";
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn unknown_keys_are_refused_by_name_with_the_nearest_known_one() {
    for (change, expected) in [
        ("model.hiden=8", "model.hiden: unknown key (hint: did you mean 'hidden'?)"),
        (
            "optim.weight-decay=0",
            "optim.weight-decay: unknown key (hint: did you mean 'weight_decay'?)",
        ),
        (
            "optim.lr.warm_up={steps=1}",
            "optim.lr.warm_up: unknown key (hint: did you mean 'warmup'?)",
        ),
        (
            "model.hidden_size=8",
            "model.hidden_size: unknown key (hint: 'hidden_size' of other programs is called \
             model.hidden here)",
        ),
        (
            "batch.micro_batch_size=8",
            "batch.micro_batch_size: unknown key (hint: 'micro_batch_size' of other programs is \
             called batch.micro here)",
        ),
        (
            "learning_rate=1e-3",
            "learning_rate: unknown key (hint: 'learning_rate' of other programs is called \
             optim.lr.peak here)",
        ),
        (
            "num-attention-heads=8",
            "num-attention-heads: unknown key (hint: 'num-attention-heads' of other programs \
             is called model.heads here)",
        ),
        ("paralel.tp=2", "paralel: unknown key (hint: did you mean 'parallel'?)"),
        ("shape.x=1", "shape: unknown key (hint: known keys: run, model, data, batch, parallel"),
        ("model.rotary_percent=0.1", "model.rotary_percent: unknown key (hint: known keys: family"),
        ("checkpoint.asinc=true", "checkpoint.asinc: unknown key (hint: did you mean 'async'?)"),
        ("run.budget={step=5}", "run.budget: expected steps, samples or tokens, found 'step'"),
    ] {
        let refusal = set(&[change]).unwrap_err();
        assert!(refusal.contains(&format!("cannot use --set: {expected}")), "{change}: {refusal}");
    }
}

/// Changes of a key to a value of another type, and the error.
const WRONG_TYPES: &[(&str, &str)] = &[
    (
        "model.hidden=wide",
        "model.hidden: expected an integer of at least 0, found the string 'wide'",
    ),
    ("model.hidden=12.5", "model.hidden: expected an integer of at least 0, found 12.5"),
    ("model.layers=-1", "model.layers: expected an integer of at least 0, found -1"),
    ("optim.clip=tight", "optim.clip: expected a number, found the string 'tight'"),
    ("optim.betas=[0.9]", "optim.betas: expected an array of length 2, found a list of 1"),
    ("optim.betas=[0.9,0.95,1]", "optim.betas: expected a list of 2, found a list of 3"),
    ("optim.betas=[0.9,true]", "optim.betas.1: expected a number, found true"),
    ("optim.lr=1e-3", "optim.lr: expected a table, found 0.001"),
    ("log.jsonl=1", "log.jsonl: expected true or false, found 1"),
    ("precision.dtype=fp8", "precision.dtype: expected fp32, bf16 or fp16, found 'fp8'"),
    (
        "optim.offload=disk",
        "optim.offload: expected none, cpu or nvme:/path, or several paths separated by \
             commas, found 'disk'",
    ),
    (
        "optim.offload='nvme:'",
        "optim.offload: expected none, cpu or nvme:/path, or several paths separated by \
             commas, found 'nvme:' with an empty path",
    ),
    (
        "optim.offload='nvme:/a,,/b'",
        "optim.offload: expected none, cpu or nvme:/path, or several paths separated by \
             commas, found 'nvme:/a,,/b' with an empty path",
    ),
    (
        "optim.offload='nvme:/a,/b,/a'",
        "optim.offload: expected none, cpu or nvme:/path, or several paths separated by \
             commas, found 'nvme:/a,/b,/a' with a duplicate path",
    ),
    (
        "optim.offload='nvme:/a{rank}'",
        "optim.offload: expected none, cpu or nvme:/path, or several paths separated by \
             commas, found 'nvme:/a{rank}' with braces around another word than local_rank",
    ),
    (
        "parallel.schedule=zigzag",
        "parallel.schedule: expected 1f1b, interleaved or gpipe, found 'zigzag'",
    ),
    ("precision.dtype=16", "precision.dtype: expected exactly one of fp32, bf16, fp16, found 16"),
    (
        "model.activation=gleu",
        "model.activation: expected gelu, gelu-tanh, geglu-tanh, relu or swiglu, found 'gleu'",
    ),
    ("run.budget=800", "run.budget: expected exactly one of steps, samples, tokens, found 800"),
    ("run.budget={}", "run.budget: expected exactly one of steps, samples, tokens, found none"),
    (
        "run.budget={steps=1,tokens=2}",
        "run.budget: expected exactly one of steps, samples, tokens, found steps and tokens",
    ),
    ("run.budget={steps=1.5}", "run.budget.steps: expected an integer of at least 0, found 1.5"),
    ("run.max_wall=90", "run.max_wall: expected a string in quotes, found 90"),
    ("run.max_wall=90x", "run.max_wall: expected a time such as 23h50m or 90s, found '90x'"),
    ("data.train=5", "data.train: expected a prefix, or [{ path = \"...\" }], found 5"),
    ("data.train=[{path=1}]", "data.train.0.path: expected a string in quotes, found 1"),
    ("data.train=[{paht=\"x\"}]", "data.train.0.paht: unknown key (hint: did you mean 'path'?)"),
];

#[test]
fn wrong_types_are_refused_by_name() {
    for (change, expected) in WRONG_TYPES {
        let refusal = set(&[change]).unwrap_err();
        assert!(refusal.contains(&format!("cannot use --set: {expected}")), "{change}: {refusal}");
    }
}

/// Changes of a key to a value out of its range, and the error.
const OUT_OF_RANGE: &[(&str, &str)] = &[
    ("model.layers=0", "model.layers: expected 1 to 1024, found 0"),
    ("model.heads=5", "model.heads: expected a divisor of hidden 128, found 5"),
    ("model.vocab=1", "model.vocab: expected 2 to 16777216, found 1"),
    ("model.init.std=nan", "model.init.std: expected 0 to 1, found NaN"),
    ("run.seed=4294967296", "run.seed: expected 0 to 4294967295, found 4294967296"),
    ("run.threads=9999", "run.threads: expected 0 to 1024, found 9999"),
    ("run.dir=''", "run.dir: expected a non-empty string, found"),
    ("run.max_wall=0s", "run.max_wall: expected at least 1s, found 0s"),
    ("run.budget={samples=15}", "run.budget: expected at least one step of 16 samples"),
    ("run.budget={tokens=1023}", "run.budget: expected at least one step of 16 samples"),
    ("run.budget={steps=0}", "run.budget.steps: expected 1 to 9007199254740992, found 0"),
    ("run.budget={steps=9007199254740992}", "run.budget: expected at most 9007199254740992 tokens"),
    ("data.train=[]", "data.train: expected 1 to 255 corpora, found 0"),
    ("data.train=['a',{path=''}]", "data.train.1.path: expected a non-empty string, found"),
    ("data.objective=mlm", "data.objective: not supported by model.family (hint: gpt takes lm"),
    ("data.train=[{path='a',weight=0}]", "data.train.0.weight: expected more than 0, found 0"),
    ("data.split='1,2,3,4'", "data.split: expected at most 3 shares, found 4"),
    ("data.split=[0,0]", "data.split: expected a share above 0, found none"),
    ("data.split='1.2.3'", "data.split: expected a number, found '1.2.3'"),
    ("data.prefetch_batches=0", "data.prefetch_batches: expected 1 to 1024, found 0"),
    ("data.local_cache={dir=''}", "data.local_cache.dir: "),
    (
        "data.local_cache={dir='x',limit='1023KiB'}",
        "data.local_cache.limit: expected at least 1MiB, found 1023KiB",
    ),
    ("data.local_cache={dir='x',limit='64'}", "data.local_cache.limit: expected a size"),
    ("batch.micro=3", "batch.micro: expected a divisor of global 16, found 3"),
    ("batch.micro=0", "batch.micro: expected 1 to 65536, found 0"),
    (
        "batch.accumulation=3",
        "batch.accumulation: expected a divisor of global / micro = 4, found 3",
    ),
    (
        "batch.rampup={start=4,increment=5,samples=9}",
        "batch.rampup.increment: expected a multiple of micro 4, found 5",
    ),
    (
        "batch.rampup={start=4,increment=8,samples=9}",
        "batch.rampup.increment: expected a divisor of global - start = 12",
    ),
    (
        "batch.rampup={start=16,increment=4,samples=9}",
        "batch.rampup.start: expected 1 to 15, found 16",
    ),
    ("model.head_dim=0", "model.head_dim: expected 1 to 131072, found 0"),
    ("model.dropout=1", "model.dropout: expected at least 0 and below 1, found 1"),
    (
        "model.attention_dropout=-0.1",
        "model.attention_dropout: expected at least 0 and below 1, found -0.1",
    ),
    ("model.dec_len=8", "model.dec_len: only valid with family \"t5\""),
    (
        "model.positions=relative-bias",
        "model.positions: not supported by model.family (hint: gpt takes",
    ),
    (
        "precision.loss_scale.min=1e9",
        "precision.loss_scale.min: expected 0.00000005960464477539063 to 65536, \
             found 1000000000",
    ),
    ("optim.lr.anneal={samples=0}", "optim.lr.anneal: expected 1 to 12672, found 0"),
    (
        "checkpoint.load_parts=['optim']",
        "checkpoint.load_parts: expected all parts or [\"model\"], found",
    ),
    ("checkpoint.keep.every=0", "checkpoint.keep.every: expected 1 to 9007199254740992, found 0"),
    ("optim.betas=[0.9,1.0]", "optim.betas.1: expected at least 0 and below 1, found 1"),
    ("optim.lr.floor=1", "optim.lr.floor: expected 0 to 0.001, found 1"),
    ("optim.lr.peak=inf", "optim.lr.peak: expected 0 to 1000, found inf"),
    ("optim.lr.warmup={fraction=1.5}", "optim.lr.warmup.fraction: expected 0 to 1, found 1.5"),
    (
        "optim.lr.warmup={steps=801}",
        "optim.lr.warmup: expected at most the 12800 samples of decay, found 12816",
    ),
    ("checkpoint.keep.last=0", "checkpoint.keep.last: expected 1 to 1000000, found 0"),
    ("checkpoint.every.minutes=0", "checkpoint.every.minutes: expected 1 to 1000000, found 0"),
    ("checkpoint.load=''", "checkpoint.load: expected a non-empty string, found"),
    ("eval.iters=0", "eval.iters: expected 1 to 1000000, found 0"),
    ("log.every=0", "log.every: expected 1 to 9007199254740992, found 0"),
];

#[test]
fn values_out_of_range_are_refused_with_the_range() {
    for (change, expected) in OUT_OF_RANGE {
        let wsd = if change.contains("anneal") { "wsd" } else { "cosine" };
        let refusal = set(&[&format!("optim.lr.style={wsd}"), change]).unwrap_err();
        assert!(refusal.contains(&format!("cannot use --set: {expected}")), "{change}: {refusal}");
    }
}

/// Megatron ignores letters and signs: it reads `1,inf,1` as two shares.
#[test]
fn letters_and_signs_in_a_split_are_refused() {
    for split in ["'1,inf,1'", "[1,inf,1]", "[1,nan]", "[-1,2]", "'1e3,1'"] {
        let refusal = set(&[&format!("data.split={split}")]).unwrap_err();
        let expected = "cannot use --set: data.split: expected numbers of digits and points";
        assert!(refusal.contains(expected), "{split}: {refusal}");
    }
}

#[test]
fn missing_keys_are_refused_by_name() {
    for (line, expected) in [
        ("heads = 4\n", "cannot use config c.toml: model.heads: required key is missing"),
        ("dir = \"runs/small\"\n", "cannot use config c.toml: run.dir: required key is missing"),
        ("peak = 1e-3\n", "cannot use config c.toml: optim.lr.peak: required key is missing"),
        (
            "train = \"data/text_document\"\n",
            "cannot use config c.toml: data.train: required key is missing",
        ),
    ] {
        assert!(SMALL.contains(line));
        let refusal = read(&SMALL.replace(line, "")).unwrap_err();
        assert!(refusal.contains(expected), "{refusal}");
    }
    assert!(
        read("").unwrap_err().contains("cannot use config c.toml: run: required key is missing")
    );
}

#[test]
fn invalid_toml_is_refused_with_its_line() {
    let refusal = read("[run]\ndir = \n").unwrap_err();
    assert!(
        refusal.starts_with("cannot read config c.toml: TOML parse error at line 2"),
        "{refusal}"
    );
    let twice = read("[run]\nseed = 1\nseed = 2\n").unwrap_err();
    assert!(twice.contains("duplicate key") && twice.contains("line 3"), "{twice}");
}

#[test]
fn overrides_win_and_need_no_quotes() {
    let config = set(&[
        "run.dir=/tmp/a b",
        "run.budget.tokens=102400",
        "run.max_wall=23h50m",
        "optim.lr.decay.steps=50",
        "optim.lr.warmup={samples=32}",
        "data.split=[969, 30, 1]",
        "data.train=[{path='x/y', weight=2}]",
        "checkpoint.load=runs/old/ckpt/step-000100",
        "optim.lr.peak=5e-4",
        "optim.lr.peak = 2e-4",
    ])
    .unwrap();
    assert_eq!(config.run.dir, "/tmp/a b");
    assert_eq!((config.run.budget, config.steps_total()), (Budget::Tokens(102_400), 100));
    let wall = Duration::from_secs(23 * 3600 + 50 * 60);
    assert_eq!(config.run.max_wall.unwrap().0, wall);
    assert_eq!(config.optim.lr.decay, Some(Length::Steps(50)));
    assert_eq!((config.lr_decay_samples(), config.lr_warmup_samples()), (800, 32));
    assert_eq!(config.data.split.0, "969,30,1");
    assert_eq!((config.corpus(), config.data.train[0].weight), ("x/y", 2.0));
    assert_eq!(config.checkpoint.load, LoadFrom::Path("runs/old/ckpt/step-000100".to_owned()));
    assert_eq!(config.optim.lr.peak, 2e-4);
}

#[test]
fn malformed_overrides_are_refused() {
    for (change, expected) in [
        ("model.layers", "--set model.layers: expected key=value, such as optim.lr.peak=1e-3"),
        ("=5", "--set =5: the key has an empty part"),
        ("model..layers=5", "--set model..layers=5: the key has an empty part"),
        ("extends=base.toml", "--set extends=base.toml: only valid in a file"),
        // A value must not inject a second key.
        (
            "model.layers=4\nrun.seed=5",
            "model.layers: expected an integer of at least 0, found the string",
        ),
    ] {
        let refusal = set(&[change]).unwrap_err();
        assert!(refusal.contains(expected), "{change}: {refusal}");
    }
}

#[test]
fn a_file_extends_its_base() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "base/small.toml", SMALL);
    write(folder.path(), "base/mid.toml", "extends = 'small.toml'\n[model]\nlayers = 6\n");
    let top =
        "extends = '../base/mid.toml'\n[run]\nbudget = { samples = 320 }\n[model]\nheads = 8\n";
    let top = write(folder.path(), "runs/top.toml", top);
    let config = Config::load(&top, &["model.heads=2".to_owned()]).unwrap();
    assert_eq!((config.model.layers, config.model.heads, config.model.hidden), (6, 2, 128));
    // The base has `steps`: a child with `samples` replaces the whole budget.
    assert_eq!((config.run.budget, config.steps_total()), (Budget::Samples(320), 20));
    // Bases are beside a file that a URL names, and not beside the last of its options.
    let by_url = format!("file:{top}?direct=off");
    assert_eq!(Config::load(&by_url, &["model.heads=2".to_owned()]).unwrap(), config);
}

const CORPORA: &str = "[corpora]\nwiki = '/data/wiki_text_document'\nbooks = 's3://b/books'\n";

#[test]
fn a_corpus_may_be_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "corpora.toml", CORPORA);
    let top = |train: &str, more: &str| {
        let small = SMALL.replace("\"data/text_document\"", train);
        let text = format!("extends = 'corpora.toml'\n{small}{more}");
        let file = write(folder.path(), "top.toml", &text);
        Config::load(&file, &["run.threads=2".to_owned()])
    };
    let wiki = top("'wiki'", "").unwrap();
    assert_eq!(wiki.corpus(), "/data/wiki_text_document");
    let by_prefix = top("'/data/wiki_text_document'", "").unwrap();
    assert_eq!(wiki, by_prefix);
    assert_eq!(wiki.resolved().to_toml(), by_prefix.resolved().to_toml());
    assert!(wiki.differences(&by_prefix).is_empty());

    // The file overrides its base; other texts are prefixes, even if they resemble a name.
    let list = "[{ path = 'books', weight = 0.3 }, { path = 'wiki', weight = 0.7 }, './wiki', 'w']";
    let blend = top(list, "[corpora]\nwiki = 'near/wiki'\n").unwrap();
    let read = blend.data.train.iter().map(|of| (of.path.as_str(), of.weight));
    let expected = [("s3://b/books", 0.3), ("near/wiki", 0.7), ("./wiki", 1.0), ("w", 1.0)];
    assert!(read.eq(expected), "{blend:?}");

    for (more, expected) in [
        ("'a/b' = 'x'", "corpora.a/b: expected a name without '/', found 'a/b' (hint: write a pr"),
        ("'s3://a' = 'x'", "corpora.s3://a: expected a name without '/', found 's3://a'"),
        ("'' = 'x'", "corpora.: expected a name without '/', found ''"),
        ("books = ''", "corpora.books: expected a non-empty string, found \"\""),
        ("books = 5", "corpora.books: expected a string in quotes, found 5"),
    ] {
        let refusal = top("'wiki'", &format!("[corpora]\n{more}\n")).unwrap_err().to_string();
        assert!(refusal.contains(&format!("top.toml: {expected}")), "{refusal}");
    }
}

#[test]
fn a_refusal_names_the_file_that_has_the_key() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "base.toml", &SMALL.replace("heads = 4", "heads = 5"));
    let top = write(folder.path(), "top.toml", "extends = 'base.toml'\n[log]\nevery = 1\n");
    let refusal = Config::load(&top, &[]).unwrap_err().to_string();
    assert!(
        refusal.contains("base.toml: model.heads: expected a divisor of hidden 128, found 5"),
        "{refusal}"
    );
}

#[test]
fn unresolvable_extends_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let a = write(folder.path(), "a.toml", "extends = 'sub/b.toml'\n");
    write(folder.path(), "sub/b.toml", "extends = '../a.toml'\n");
    let refusal = Config::load(&a, &[]).unwrap_err().to_string();
    assert!(refusal.contains("a.toml -> ") && refusal.contains("sub/b.toml -> "), "{refusal}");
    assert!(refusal.ends_with("'extends' forms a cycle"), "{refusal}");

    for depth in 0..20 {
        let text = format!("extends = 'deep{}.toml'\n", depth + 1);
        write(folder.path(), &format!("deep{depth}.toml"), &text);
    }
    let deep = folder.path().join("deep0.toml");
    let refusal = Config::load(deep.to_str().unwrap(), &[]).unwrap_err().to_string();
    assert!(refusal.ends_with("'extends' is nested more than 16 files deep"), "{refusal}");

    let number = write(folder.path(), "number.toml", "extends = 5\n");
    let refusal = Config::load(&number, &[]).unwrap_err().to_string();
    assert!(
        refusal.ends_with("expected a file name in quotes after 'extends', found 5"),
        "{refusal}"
    );

    let orphan = write(folder.path(), "orphan.toml", "extends = 'nowhere.toml'\n");
    let refusal = Config::load(&orphan, &[]).unwrap_err().to_string();
    assert!(refusal.contains("nowhere.toml: no such file or folder"), "{refusal}");
}

#[test]
fn files_that_are_not_a_config_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let huge = folder.path().join("huge.toml");
    fs::write(&huge, vec![b'#'; (1 << 20) + 1]).unwrap();
    let refusal = Config::load(huge.to_str().unwrap(), &[]).unwrap_err().to_string();
    assert!(refusal.contains("expected at most 1 MiB, found 1048577 bytes"), "{refusal}");
    let binary = folder.path().join("binary.toml");
    fs::write(&binary, b"a = \xff\n").unwrap();
    let refusal = Config::load(binary.to_str().unwrap(), &[]).unwrap_err().to_string();
    assert!(refusal.contains("expected text, found invalid UTF-8 at byte 4"), "{refusal}");
}

#[test]
fn the_resolved_config_reads_back_equal_and_has_no_default_left() {
    let config = set(&["run.max_wall=1d2s", "checkpoint.every.minutes=30"]).unwrap();
    let resolved = config.resolved();
    assert!(resolved.run.threads >= 1);
    assert_eq!(resolved.optim.lr.warmup, Warmup::Samples(128));
    assert_eq!(resolved.optim.lr.decay, Some(Length::Samples(12_800)));
    let text = resolved.to_toml();
    for line in ["max_wall = \"1d2s\"", "load = \"auto\"", "ffn = 512", "dir = \"runs/small/ckpt\""]
    {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
    assert_eq!(Config::from_toml("resolved", &text).unwrap(), resolved);
    assert_eq!(resolved.resolved(), resolved);
}

#[test]
fn floats_survive_the_recorded_config_exactly() {
    for peak in ["6e-4", "0.1", "1e-300", "0.30000000000000004", "5e-324", "999.9999999999999"] {
        let config = set(&[&format!("optim.lr.peak={peak}")]).unwrap();
        let again = Config::from_toml("again", &config.to_toml()).unwrap();
        assert_eq!(again.optim.lr.peak.to_bits(), peak.parse::<f64>().unwrap().to_bits());
    }
}

#[test]
fn a_resumed_run_is_compared_with_its_checkpoint() {
    let saved = set(&["run.threads=2"]).unwrap().resolved();
    let check = |changes: &[&str], expected: &[(&str, &str, &str, ResumeEffect)]| {
        let changes = [&["run.threads=2"], changes].concat();
        let found = set(&changes).unwrap().differences(&saved);
        let found: Vec<_> = found
            .iter()
            .map(|d| (d.key.as_str(), d.there.as_str(), d.here.as_str(), d.effect))
            .collect();
        assert_eq!(found, expected, "{changes:?}");
    };
    check(&[], &[]);
    check(&["run.dir=x", "log.every=1", "eval.every=5", "checkpoint.keep.last=1"], &[]);
    // The same length in another unit is not a difference.
    check(&["run.budget={samples=12800}", "optim.lr.warmup={samples=128}", "model.ffn=512"], &[]);
    // Nor is another layout, another path of the corpus, or another initialization, which is not
    // used again.
    check(
        &[
            "parallel.pp=2",
            "parallel.zero=1",
            "parallel.bucket_mib=1",
            "parallel.recompute.mode=full",
            "parallel.activation_offload='nvme:/away'",
            "data.train=[{path='elsewhere', weight=3}]",
            "model.init.std=0.5",
            "optim.offload=cpu",
            "checkpoint.async=false",
        ],
        &[],
    );
    check(&["parallel.tp=2"], &[("parallel.tp", "1", "2", ResumeEffect::OtherBits)]);
    let ramp = "batch.rampup={start=8,increment=8,samples=64}";
    let found = set(&["run.threads=2", ramp]).unwrap().differences(&saved);
    assert!(
        found.iter().any(|d| d.key == "batch.rampup.start" && d.there == "absent"),
        "{found:?}"
    );
    let without = set(&["run.threads=2"]).unwrap();
    let found = without.differences(&set(&["run.threads=2", ramp]).unwrap());
    assert!(found.iter().any(|d| d.key == "batch.rampup.start" && d.here == "absent"), "{found:?}");
    check(
        &["data.train=['a', 'b']"],
        &[(
            "data.train",
            "[{ path = \"\", weight = 1.0 }]",
            "[{ path = \"\", weight = 1.0 }, { path = \"\", weight = 1.0 }]",
            ResumeEffect::OtherRun,
        )],
    );
    check(
        &["model.layers=5", "optim.lr.peak=2e-3", "batch.micro=2"],
        &[
            ("batch.micro", "4", "2", ResumeEffect::OtherBits),
            ("model.layers", "4", "5", ResumeEffect::OtherRun),
            ("optim.lr.peak", "0.001", "0.002", ResumeEffect::OtherBits),
        ],
    );
    check(
        &["run.budget.steps=900", "run.threads=3", "optim.lr.decay.steps=800"],
        &[
            ("run.budget.samples", "12800", "14400", ResumeEffect::OtherRun),
            ("run.threads", "2", "3", ResumeEffect::OtherBits),
        ],
    );
}

/// A config recorded by an earlier version has the same meaning as then.
#[test]
fn a_recorded_config_without_the_newer_keys_is_the_same_run() {
    let text = "[run]\ndir = \"r\"\nseed = 1\nthreads = 1\n[run.budget]\nsteps = 48\n\
                [model]\nfamily = \"gpt\"\nlayers = 2\nhidden = 64\nheads = 2\nffn = 256\n\
                activation = \"gelu-tanh\"\nvocab = 500\nseq_len = 16\n\
                [model.init]\nstd = 0.02\nscaled_output = true\n\
                [[data.train]]\npath = \"c\"\nweight = 1.0\n\
                [batch]\nglobal = 12\nmicro = 4\naccumulation = 3\n\
                [precision]\ndtype = \"fp32\"\n[optim]\nbetas = [0.9, 0.95]\neps = 1e-8\n\
                weight_decay = 0.1\nclip = 1.0\n[optim.lr]\nstyle = \"cosine\"\npeak = 0.003\n\
                floor = 0.0\n[optim.lr.warmup]\nsamples = 5\n[optim.lr.decay]\nsamples = 576\n\
                [checkpoint]\ndir = \"r/ckpt\"\nload = \"auto\"\n[checkpoint.keep]\nlast = 2\n";
    let config = read(text).unwrap();
    assert_eq!(config.divide(1).map(|division| division.micro_batches), Ok(3));
    let again = Config::from_toml("now", &config.resolved().to_toml()).unwrap();
    assert_eq!(again.differences(&config), []);
}

/// A key of another model would have no effect.
#[test]
fn keys_of_another_model_are_refused() {
    for (change, expected) in [
        ("model.rope_theta=500000", "model.rope_theta: only valid with positions \"rope\""),
        (
            "model.relative_buckets=64",
            "model.relative_buckets: only valid with positions \"relative-bias\"",
        ),
        (
            "model.relative_max=256",
            "model.relative_max: only valid with positions \"relative-bias\"",
        ),
        ("model.token_types=4", "model.token_types: only valid with family \"bert\""),
        (
            "data.mask_prob=0.3",
            "data.mask_prob: only valid with objective \"span-corruption\" or \"mlm\"",
        ),
        (
            "data.short_seq_prob=0",
            "data.short_seq_prob: only valid with objective \"span-corruption\" or",
        ),
    ] {
        let refusal = set(&[change]).unwrap_err();
        assert!(refusal.contains(&format!("cannot use --set: {expected}")), "{change}: {refusal}");
    }
    let megatrons = ["model.family=t5", "model.dec_len=32", "model.positions=learned"];
    let refusal = set(&[&megatrons[..], &["model.relative_max=256"]].concat()).unwrap_err();
    assert!(refusal.contains("model.relative_max: only valid with positions"), "{refusal}");
    // The key is accepted if the model has it, or if it has its default value.
    for changes in [
        &["model.rope_theta=10000", "model.token_types=2", "data.mask_prob=0.15"][..],
        &["model.positions=rope", "model.rope_theta=500000"],
        &["model.family=t5", "model.dec_len=32", "model.relative_max=256"],
        &["model.family=bert", "model.token_types=4", "data.short_seq_prob=0"],
    ] {
        assert!(set(changes).is_ok(), "{changes:?}");
    }
    // Configs recorded before such keys were refused can still be resumed.
    let recorded = SMALL.replace("seq_len = 64", "seq_len = 64\nrope_theta = 500000.0");
    assert!(read(&recorded).is_ok());
}

/// A key that depends on a switch is only reported, because users turn the switch off and on.
#[test]
fn keys_without_effect_are_reported() {
    let idle = |changes: &[&str]| set(changes).unwrap().idle();
    let check = |changes: &[&str], expected: &[&str]| {
        let reports = idle(changes);
        let is_it = |(report, expected): (&String, &&str)| report.starts_with(expected);
        let all = reports.len() == expected.len() && reports.iter().zip(expected).all(is_it);
        assert!(all, "{changes:?}: {reports:?}, expected {expected:?}");
    };
    check(&[], &[]);
    let scale = "precision.loss_scale={init=1024}";
    let no_scale = "precision.loss_scale has no effect: precision.dtype is not \"fp16\"";
    check(&[scale], &[no_scale]);
    check(&[scale, "precision.dtype=fp16"], &[]);
    check(&["optim.lr.style=constant", "optim.lr.floor=1e-5"], &["optim.lr.floor has no effect"]);
    check(&["optim.lr.floor=1e-5"], &[]);
    let wsd = ["optim.lr.anneal={steps=80}", "optim.lr.anneal_style=linear"];
    check(&wsd, &["optim.lr.anneal has no effect", "optim.lr.anneal_style has no effect"]);
    check(&[&wsd[..], &["optim.lr.style=wsd"]].concat(), &[]);
    check(
        &["optim.lr.style=wsd", "optim.lr.floor_mode=clamp"],
        &["optim.lr.floor_mode has no effect"],
    );
    let warm = ["optim.lr.start=1e-5", "optim.lr.warmup_shape=log"];
    check(&warm, &[]);
    check(
        &[&warm[..], &["optim.lr.warmup={steps=0}"]].concat(),
        &[
            "optim.lr.start has no effect: there is no warm-up",
            "optim.lr.warmup_shape has no effect: there is no warm-up",
        ],
    );
    let test = ["optim.lr.style=range-test", "optim.lr.warmup_shape=log"];
    check(&[&test[..], &["optim.lr.floor=1e-6"]].concat(), &[]);
    check(
        &[&test[..], &["optim.lr.warmup={steps=9}"]].concat(),
        &["optim.lr.warmup_shape has no effect: with optim.lr.floor = 0", "optim.lr.warmup has no"],
    );
    // With one stage too: all inputs of layers exist at once.
    check(&["parallel.schedule=gpipe"], &[]);
    check(&["checkpoint.load_parts=['model']"], &["checkpoint.load_parts has no effect"]);
    check(&["checkpoint.load_parts=['model']", "checkpoint.load=a/step-000000000001"], &[]);
    // The recorded config has no keys without effect.
    for style in ["cosine", "constant", "wsd", "range-test", "inverse-sqrt", "exponential"] {
        let config = set(&[&format!("optim.lr.style={style}")]).unwrap();
        assert_eq!(config.resolved().idle(), [""; 0], "{style}");
    }
}

/// Deeply nested keys and values are refused without a stack overflow.
#[test]
fn deep_keys_are_refused() {
    let key = vec!["a"; 20_000].join(".");
    let refusal = set(&[&format!("{key}=1")]).unwrap_err();
    assert!(refusal.contains("the key has more than 32 parts"), "{} bytes", refusal.len());
    for value in [
        format!("{}1{}", "[".repeat(20_000), "]".repeat(20_000)),
        format!("{}1{}", "{a=".repeat(20_000), "}".repeat(20_000)),
    ] {
        let file = format!("[run]\ndir = {value}\n");
        assert!(Config::from_toml("deep.toml", &file).is_err());
    }
    let file = format!("{key} = 1\n");
    assert!(Config::from_toml("deep.toml", &file).is_err());
    let file = format!("[{key}]\nb = 1\n");
    assert!(Config::from_toml("deep.toml", &file).is_err());
}
