//! Defaults of other systems that differ from those here, and keys that took effect silently.

use recipe::import::{Imported, KeyStatus};

use crate::import::{check, fate, read_text, refused};
use crate::import_values::read_files;

fn megatron(flags: &str) -> Imported {
    let base = "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --seq-length 32 \
                --max-position-embeddings 32 --vocab-size 500 --data-path d --lr 1e-3 \
                --train-iters 100";
    read_text("megatron", "flags.txt", &format!("{base} {flags}\n")).unwrap()
}

const NEW: &str = "--micro-batch-size 2 --global-batch-size 8";

/// `validate_args` and the defaults of argparse.
#[test]
fn defaults_of_megatron_are_written() {
    // int(4 x 192 x 2 / 3 / 64) x 64 = 512; all others have 4 x 192.
    check(&megatron(&format!("{NEW} --swiglu")), &[("model.ffn", "512")]);
    check(&megatron(&format!("{NEW} --swiglu --ffn-hidden-size 320")), &[("model.ffn", "320")]);
    check(&megatron(NEW), &[("model.ffn", "absent"), ("precision.loss_scale", "absent")]);
    let fp16 = megatron(&format!("{NEW} --fp16"));
    check(&fp16, &[("precision.loss_scale.init", "4294967296")]);
    assert!(fp16.to_string().contains("#   default: initial-loss-scale = 4294967296"), "{fp16}");
    let fixed = megatron(&format!("{NEW} --fp16 --loss-scale 1024"));
    check(&fixed, &[("precision.loss_scale.init", "1024.0"), ("precision.loss_scale.window", "0")]);
    check(
        &megatron(NEW),
        &[
            ("optim.betas", "[0.9, 0.999]"),
            ("optim.eps", "0.00000001"),
            ("optim.weight_decay", "0.01"),
            ("optim.clip", "1.0"),
            ("model.dropout", "0.1"),
            ("model.attention_dropout", "0.1"),
            ("model.init.std", "0.02"),
            ("optim.lr.warmup", "{ steps = 0 }"),
            ("checkpoint.every.steps", "0"),
            ("eval.every", "1000"),
            ("eval.iters", "100"),
            ("data.split", "\"969,30,1\""),
            ("run.seed", "1234"),
        ],
    );
    // Sequence parallelism is off without tensor parallelism.
    let alone = megatron(&format!("{NEW} --sequence-parallel"));
    check(&alone, &[("parallel.sequence_parallel", "absent")]);
    assert_eq!(fate(&alone, "--sequence-parallel").0, KeyStatus::Implied, "{alone}");
    let divided = megatron(&format!("{NEW} --sequence-parallel --tensor-model-parallel-size 2"));
    check(&divided, &[("parallel.sequence_parallel", "true")]);
}

/// Megatron of 2019 saves every 5,000 steps, warms up for a hundredth of the run, and downloads its
/// vocabulary.
#[test]
fn defaults_of_megatron_of_2019_are_written() {
    let bert = |flags: &str| {
        let script = format!(
            "python pretrain_bert.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 \
             --seq-length 32 --max-position-embeddings 32 --train-iters 100 --lr 1e-3 \
             --batch-size 8 --data-path d --tokenizer-type BertWordPieceTokenizer {flags}\n"
        );
        read_text("megatron", "run.sh", &script).unwrap()
    };
    let large = bert("--tokenizer-model-type bert-large-uncased --presplit-sentences");
    check(
        &large,
        &[
            ("checkpoint.every.steps", "5000"),
            ("optim.lr.warmup", "{ fraction = 0.01 }"),
            ("model.vocab", "30522"),
            ("data.tokenizer", "\"BertWordPieceLowerCase\""),
        ],
    );
    // Its norms are after the blocks, as here; those of later releases are not.
    assert_eq!(refused(&large), Vec::<&str>::new(), "{large}");
    check(&large, &[("model.family", "\"bert\""), ("model.norm_eps", "0.00001")]);
    assert!(fate(&large, "--presplit-sentences").1.contains("--lang newline"), "{large}");
    assert!(large.notes.iter().any(|note| note.contains("BertWordPieceLowerCase:vocab.txt")));
    let cased = bert("--tokenizer-model-type bert-base-cased --vocab-file v.txt");
    check(&cased, &[("model.vocab", "28996")]);
    check(&cased, &[("data.tokenizer", "\"BertWordPieceCase:v.txt\"")]);
    let later = bert("--vocab-file v.txt");
    check(&later, &[("checkpoint.every.steps", "0")]);
    assert_eq!(refused(&later), ["model.family"], "{later}");
    assert!(fate(&later, "model.family").1.contains("since 2020"), "{later}");
    assert!(later.notes.iter().any(|note| note.contains("saved every 5000 steps")), "{later}");
    let own = bert("--tokenizer-model-type my-vocabulary --use-new-lr");
    assert!(refused(&own).contains(&"--tokenizer-model-type"), "{own}");
    assert!(fate(&own, "--use-new-lr").1.contains("optim.lr.peak"), "{own}");
    assert!(own.notes.iter().any(|note| note.contains("`feedline inspect d` prints it")), "{own}");
}

/// CPM-2 is built on the arguments of 2019, and CPM-1 on later ones.
#[test]
fn defaults_of_cpm_are_written() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let text = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
    // Unknown flags in place of those with defaults.
    let without =
        |name: &str| text(name).replace("--save-interval", "--no-1").replace("--split", "--no-2");
    let one = read_files("cpm", &[("run.sh", &without("cpm1_gpt2.sh"))], None);
    check(&one, &[("checkpoint.every.steps", "0"), ("data.split", "\"969,30,1\"")]);
    let two = [
        ("run.sh", &*without("cpm2.sh")),
        ("cpm2_model.json", &*text("cpm2_model.json")),
        ("cpm2_ds.json", &*text("cpm2_ds.json")),
    ];
    let two = read_files("cpm", &two, None);
    check(&two, &[("checkpoint.every.steps", "5000"), ("data.split", "\"1000,1,1\"")]);
}

#[test]
fn defaults_of_deepspeed_are_written() {
    let run = |scheduler: &str, lr: &str| {
        let text = format!(
            "{{\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 2, \"fp16\": \
             {{\"enabled\": true}}, \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{{lr}}}}}, \
             \"scheduler\": {scheduler}}}"
        );
        read_files("deepspeed", &[("ds.json", &text)], Some(4))
    };
    let bare = run("{\"type\": \"WarmupLR\"}", "\"lr\": 1e-3");
    check(
        &bare,
        &[
            ("optim.lr.style", "\"constant\""),
            ("optim.lr.lag", "\"all\""),
            ("optim.lr.warmup", "{ steps = 1000 }"),
            ("optim.lr.warmup_shape", "\"log\""),
            ("optim.lr.start", "0.0"),
            ("optim.lr.peak", "0.001"),
            ("precision.loss_scale.init", "65536"),
            ("precision.loss_scale.window", "1000"),
            ("precision.loss_scale.window_delay", "1"),
            ("precision.loss_scale.hysteresis", "2"),
            ("optim.clip", "0.0"),
        ],
    );
    assert_eq!(refused(&bare), [""; 0], "{bare}");
    // The rate at the end of the warm-up depends on the version.
    let other = run("{\"type\": \"WarmupLR\", \"params\": {}}", "\"lr\": 2e-4");
    assert_eq!(refused(&other), ["scheduler.params.warmup_max_lr"], "{other}");
    let decay = "{\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": 90}}";
    let decay = run(decay, "\"lr\": 2e-4");
    check(&decay, &[("optim.lr.peak", "0.001"), ("optim.lr.decay", "{ steps = 90 }")]);
    assert_eq!(fate(&decay, "optimizer.params.lr").0, KeyStatus::Implied, "{decay}");
    assert!(decay.notes.iter().any(|note| note.contains("WarmupDecayLR rises to 0.001")));
    let missing = run("{\"type\": \"WarmupCosineLR\"}", "\"lr\": 2e-4");
    assert_eq!(refused(&missing), ["scheduler.params.total_num_steps"], "{missing}");
    // A parameter of another scheduler is an error of DeepSpeed.
    let odd =
        "{\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": 1, \"cos_min_ratio\": 0.1}}";
    let odd = run(odd, "\"lr\": 1");
    assert_eq!(fate(&odd, "scheduler.params.cos_min_ratio").1, "WarmupLR has no such parameter");
    assert!(refused(&odd).contains(&"scheduler.params.cos_min_ratio"), "{odd}");
}

/// A schedule of the program and one of DeepSpeed were mixed.
#[test]
fn two_schedules_are_not_mixed() {
    let script = "deepspeed --num_gpus 2 pretrain_gpt2.py --num-layers 4 --hidden-size 64 \
                  --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
                  --batch-size 4 --train-iters 100 --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine \
                  --warmup 0.1 --data-path d --deepspeed_config ds.json\n";
    let json = "{\"train_micro_batch_size_per_gpu\": 4, \"scheduler\": {\"type\": \"LRRangeTest\", \
                \"params\": {\"lr_range_test_min_lr\": 1e-6, \"lr_range_test_step_size\": 50}}}";
    let run = read_files("deepspeed", &[("run.sh", script), ("ds.json", json)], None);
    check(
        &run,
        &[
            ("optim.lr.style", "\"cosine\""),
            ("optim.lr.peak", "0.0002"),
            ("optim.lr.floor", "0.00001"),
            ("optim.lr.decay", "absent"),
        ],
    );
    let keys = ["type", "params.lr_range_test_min_lr", "params.lr_range_test_step_size"];
    let mut found = refused(&run);
    found.sort_unstable();
    let mut expected = keys.map(|key| format!("scheduler.{key}"));
    expected.sort_unstable();
    assert_eq!(found, expected, "{run}");
}

#[test]
fn defaults_of_transformers_are_written() {
    let run = |more: &str| {
        let text = format!("{{\"output_dir\": \"o\", \"max_steps\": 1000{more}}}");
        read_text("hf", "args.json", &text).unwrap()
    };
    check(
        &run(", \"fp16\": true"),
        &[
            ("optim.lr.style", "\"linear\""),
            ("optim.lr.peak", "0.00005"),
            ("optim.lr.warmup", "{ steps = 0 }"),
            ("optim.betas", "[0.9, 0.999]"),
            ("optim.eps", "0.00000001"),
            ("optim.weight_decay", "0.0"),
            ("optim.clip", "1.0"),
            ("precision.loss_scale.init", "65536"),
            ("precision.loss_scale.window", "2000"),
            ("precision.loss_scale.hysteresis", "1"),
            ("batch.micro", "8"),
            ("checkpoint.every.steps", "500"),
            ("eval.every", "0"),
        ],
    );
    let constant = run(", \"lr_scheduler_type\": \"constant\", \"warmup_steps\": 100");
    check(&constant, &[("optim.lr.style", "\"constant\""), ("optim.lr.warmup", "{ steps = 0 }")]);
    let text = "constant has no warm-up; constant_with_warmup has one";
    assert_eq!(fate(&constant, "warmup_steps"), (KeyStatus::Implied, text));
    for (given, steps) in [("0.1", 100), ("0.0155", 16), ("30", 30)] {
        let warm = run(&format!(", \"warmup_steps\": {given}"));
        check(&warm, &[("optim.lr.warmup", &format!("{{ steps = {steps} }}"))]);
    }
    check(&run(", \"warmup_ratio\": 0.03"), &[("optim.lr.warmup", "{ steps = 30 }")]);
    let part = read_text("hf", "args.json", "{\"output_dir\": \"o\", \"warmup_steps\": 0.2}");
    check(&part.unwrap(), &[("optim.lr.warmup", "{ fraction = 0.2 }")]);
    for (more, key) in [
        (", \"warmup_steps\": 1.5", "warmup_steps"),
        (", \"lr_scheduler_type\": \"polynomial\"", "lr_scheduler_type"),
        (", \"lr_scheduler_type\": \"inverse_sqrt\"", "lr_scheduler_type"),
        (", \"lr_scheduler_type\": \"warmup_stable_decay\"", "lr_scheduler_kwargs"),
        (", \"lr_scheduler_kwargs\": {\"min_lr\": 1e-5}", "lr_scheduler_kwargs.min_lr"),
        (", \"save_strategy\": \"epoch\"", "save_strategy"),
        (", \"eval_strategy\": \"epoch\"", "eval_strategy"),
        (", \"max_steps_\": 1", "max_steps_"),
    ] {
        assert_eq!(refused(&run(more)), [key], "{more}");
    }
    let saves =
        run(", \"save_strategy\": \"no\", \"eval_strategy\": \"steps\", \"logging_steps\": 20");
    check(&saves, &[("checkpoint.every.steps", "0"), ("eval.every", "20")]);
}

const PADDLE: &str = "Global:\n  global_batch_size: 16\n  micro_batch_size: 2\nEngine:\n  \
    mix_precision:\n    enable: True\nModel:\n  name: GPT\n  vocab_size: 500\n  hidden_size: 64\n  \
    num_layers: 2\n  num_attention_heads: 2\nData:\n  Train:\n    dataset:\n      input_dir: \
    ./data/\n      split: [949, 50, 1]\n      max_seq_len: 32\nOptimizer:\n  name: AdamW\n  \
    lr:\n    name: CosineAnnealingWithWarmupDecay\n    decay_steps: 400\n    max_lr: 1.0e-3\n    \
    warmup_rate: 0.01\n";

#[test]
fn defaults_of_paddle_are_written() {
    let paddle = |more: &str| read_text("paddle", "run.yaml", &format!("{PADDLE}{more}")).unwrap();
    let run = paddle("Distributed:\n  dp_degree: 2\n");
    check(
        &run,
        &[
            ("run.budget", "{ steps = 500000 }"),
            ("optim.clip", "0.0"),
            ("optim.weight_decay", "0.01"),
            ("checkpoint.every.steps", "0"),
            ("eval.every", "0"),
            ("precision.loss_scale.init", "32768.0"),
        ],
    );
    let data = "Data.Train.dataset.input_dir";
    assert_eq!((refused(&run), &*run.missing), (vec![data], &["data.train"][..]), "{run}");
    let convert = "`feedline convert ./data/NAME ./data/converted`";
    assert!(fate(&run, data).1.contains(convert), "{run}");
    // More replicas than micro-batches: was mapped to an impossible run.
    let wide = paddle("Distributed:\n  dp_degree: 1\n  sharding:\n    sharding_degree: 16\n");
    check(&wide, &[("parallel.zero", "2")]);
    let text = "expected a multiple of micro 2 x dp 16 = 32, found 16";
    assert_eq!(fate(&wide, "batch.global"), (KeyStatus::Refused, text));
    let eval = |folder: &str| {
        let data = format!(
            "  Eval:\n    dataset:\n      input_dir: {folder}\n      split: [949, 50, 1]\n\
             Optimizer:"
        );
        let text = PADDLE.replace("Optimizer:", &data);
        read_text("paddle", "run.yaml", &text).unwrap()
    };
    assert_eq!(refused(&eval("./data/")), [data]);
    assert_eq!(refused(&eval("./other/")), ["Data.Eval.dataset.input_dir", data]);
}

/// PyYAML accepts a document whose first line is indented, such as one of PaddleFleetX.
#[test]
fn an_indented_yaml_document_is_read() {
    let text = "  Global:\n    seed: 7\n  Model:\n    name: GPT\n";
    check(&read_text("paddle", "run.yaml", text).unwrap(), &[("run.seed", "7")]);
    let odd = read_text("paddle", "run.yaml", "  Global:\n    seed: 7\nModel:\n  name: GPT\n");
    assert!(odd.unwrap_err().contains("line 3: indentation matches no mapping"));
}

/// The argument of `colossalai.launch`, and the code around it.
#[test]
fn a_colossal_config_in_a_program_is_read() {
    let text = "from colossalai.amp import AMP_TYPE\nSEQ_LEN = 64\nBATCH_SIZE = 24\n\
                CONFIG = dict(NUM_MICRO_BATCHES=6, parallel=dict(pipeline=2, \
                tensor=dict(mode='1d', size=4)),\n    fp16=dict(mode=AMP_TYPE.TORCH))\n\n\n\
                def train():\n    \
                model = build(1)\n\n    run(model)\n\n\nif __name__ == '__main__':\n    train()\n";
    let run = read_text("colossal", "train.py", text).unwrap();
    check(
        &run,
        &[
            ("parallel.tp", "4"),
            ("parallel.pp", "2"),
            ("batch.micro", "4"),
            ("precision.dtype", "\"fp16\""),
            ("precision.loss_scale.window", "2000"),
        ],
    );
    assert_eq!(refused(&run), ["line 8", "line 14"], "{run}");
    assert!(
        run.problems().unwrap().starts_with("cannot follow 2 keys: line 8, line 14; "),
        "{run}"
    );
    // A tutorial in one file: its texts, classes and calls come before its names too.
    let program = format!(
        "\"\"\"Trains.\n\nA = b\n\"\"\"\nimport torch\nclass Texts(Dataset):\n    size = 4\n\n    \
         def __len__(self):\n        return 1\n\n\n@cached\ndef build(\n    chunks=1,\n):\n    \
         return 2\n\n\ntorch.backends.cudnn.benchmark = True\n{text}"
    );
    let whole = read_text("colossal", "train.py", &program).unwrap();
    let code = ["line 6", "line 13", "line 14", "line 20", "line 28", "line 34"];
    assert_eq!((refused(&whole), &whole.config), (code.to_vec(), &run.config), "{whole}");
    let twice = "SEQ_LEN = 64\nCONFIG = dict(SEQ_LEN=32)\n";
    let refusal = read_text("colossal", "a.py", twice).unwrap_err();
    assert!(refusal.contains("CONFIG has another value of SEQ_LEN"), "{refusal}");
}
