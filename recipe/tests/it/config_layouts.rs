//! Layouts, batches and families of a config.

use std::fs;
use std::ops::Range;

use recipe::config::Config;

const SMALL: &str = "[run]\ndir = 'runs/small'\nbudget = { steps = 800 }\n[model]\nlayers = 4\n\
                     hidden = 128\nheads = 4\nvocab = 50257\nseq_len = 64\n[data]\n\
                     train = 'd'\n[batch]\nglobal = 16\nmicro = 4\n[optim.lr]\npeak = 1e-3\n";

fn read(text: &str) -> Result<Config, String> {
    Config::from_toml("c.toml", text).map_err(|error| error.to_string())
}

/// Reads the small config from a file with overrides.
fn set(sets: &[&str]) -> Result<Config, String> {
    let folder = tempfile::tempdir().expect("make a folder");
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let file = folder.path().join("c.toml");
    fs::write(&file, SMALL).expect("write a config");
    Config::load(file.to_str().expect("UTF-8"), &sets).map_err(|error| error.to_string())
}

/// The batch identity of `CPM-1`'s T5 (4 x 16 on 2 replicas) and of its GPT-2 (4 x 16 on 1), and
/// the refusals that belong to a layout.
#[test]
fn a_world_divides_or_is_refused_with_the_reason() {
    let check = |sets: &[&str], world: u64, expected: Result<[u64; 4], &str>| {
        let sets = [&["model.layers=8", "model.heads=8"], sets].concat();
        match (set(&sets).unwrap().divide(world), expected) {
            (Ok(found), Ok(expected)) => {
                let found = [found.dp, found.tp, found.pp, found.micro_batches];
                assert_eq!(found, expected, "{sets:?} on {world}");
            }
            (Err(found), Err(expected)) => {
                let found = found.join("\n");
                assert!(found.contains(expected), "{sets:?} on {world}: {found}");
            }
            (found, expected) => {
                panic!("{sets:?} on {world}: found {found:?}, expected {expected:?}")
            }
        }
    };
    let t5 = ["batch.global=128", "parallel.tp=2", "batch.accumulation=16"];
    check(&t5, 4, Ok([2, 2, 1, 16]));
    let gpt = ["batch.global=64", "parallel.tp=2", "parallel.pp=2", "batch.accumulation=16"];
    check(&gpt, 4, Ok([1, 2, 2, 16]));
    check(&gpt, 8, Err("batch.accumulation: expected global / (micro x dp) = 8, found 16"));
    check(&gpt, 6, Err("expected a multiple of tp 2 x pp 2 = 4 ranks, found 6"));
    check(&[], 0, Err("expected a multiple of tp 1 x pp 1 = 1 ranks, found 0"));
    check(
        &[],
        8,
        Err("batch.global: expected a multiple of micro 4 x dp 8 = 32, found 16: global = micro x"),
    );
    check(&["batch.global=24"], 3, Err("expected powers of two with \"tree\", found dp 3 and 2"));
    check(
        &["batch.global=24"],
        2,
        Err("found dp 2 and 3 micro-batches per replica (hint: parallel."),
    );
    check(&["batch.global=24", "parallel.reduce=ring"], 3, Ok([3, 1, 1, 2]));
    check(&["batch.global=24"], 1, Ok([1, 1, 1, 6]));
    let interleaved =
        ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.pp=4"];
    check(&interleaved, 4, Ok([1, 1, 4, 4]));
    check(
        &[&interleaved[..], &["batch.micro=8"]].concat(),
        4,
        Err("a multiple of pp 4 micro-batches per replica with \"interleaved\", found 2"),
    );
    let ramp = "batch.rampup={start=4,increment=4,samples=64}";
    check(
        &[ramp],
        2,
        Err("batch.rampup.start: expected a multiple of micro 4 x dp 2 = 8, found 4"),
    );
    let twelve =
        "found dp 2 and 3 micro-batches per replica of a batch of 12 (hint: parallel.reduce";
    check(&[ramp, "batch.micro=2"], 2, Err(twelve));
    check(&[ramp, "batch.micro=2"], 1, Ok([1, 1, 1, 8]));
    check(&[ramp, "batch.micro=2", "parallel.reduce=ring"], 2, Ok([2, 1, 1, 4]));
    let double = "batch.rampup={start=8,increment=8,samples=64}";
    check(&[double, "batch.micro=2"], 4, Ok([4, 1, 1, 2]));
}

#[test]
fn impossible_layouts_are_refused() {
    let t5 = ["model.family=t5", "model.dec_len=32"];
    let interleaved =
        ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.pp=2"];
    for (sets, expected) in [
        (vec!["model.family=t5"], "model.dec_len: required with family \"t5\" and missing"),
        (vec!["parallel.tp=3"], "parallel.tp: expected a divisor of model.heads 4, found 3"),
        (
            vec!["parallel.tp=4", "model.ffn=30"],
            "parallel.tp: expected a divisor of model.ffn 30, found 4",
        ),
        (vec!["parallel.sequence_parallel=true"], "expected parallel.tp of at least 2"),
        (
            vec!["parallel.sequence_parallel=true", "parallel.tp=4", "model.seq_len=66"],
            "parallel.sequence_parallel: expected model.seq_len divisible by tp 4, found 66",
        ),
        (vec!["parallel.pp=5"], "expected pp x virtual_stages of at most 4 layers, found 5"),
        (
            vec!["parallel.zero=2", "parallel.tp=2"],
            "parallel.zero: expected 0 or 1 where tp or pp is above 1, found 2",
        ),
        (vec!["parallel.zero=4"], "parallel.zero: expected 0 to 3, found 4"),
        (
            vec!["parallel.zero=3", "optim.offload=cpu"],
            "optim.offload: expected parallel.zero of 0",
        ),
        (
            vec!["parallel.virtual_stages=2"],
            "expected 1 unless schedule is \"interleaved\", found 2",
        ),
        (
            vec!["parallel.schedule=interleaved"],
            "parallel.virtual_stages: expected at least 2 with schedule",
        ),
        (
            vec![interleaved[0], interleaved[1]],
            "parallel.pp: expected at least 2 with schedule \"interleaved\"",
        ),
        ([&t5[..], &interleaved[..]].concat(), "\"interleaved\" is only valid with family \"gpt\""),
        (vec!["parallel.layers_per_stage=[3]"], "expected a sum of 4 layers, found 3"),
        (
            vec!["parallel.layers_per_stage=[2,2]"],
            "expected pp x virtual_stages = 1 numbers, found 2",
        ),
        (
            vec!["parallel.pp=2", "parallel.layers_per_stage=[0,4]"],
            "expected at least 1 layer per stage, found 0",
        ),
        (vec!["parallel.recompute={mode='full',except=[4]}"], "expected layers below 4, found 4"),
        (vec!["parallel.recompute={except=[1]}"], "only valid with recompute.mode = \"full\""),
        (
            vec!["parallel.activation_offload='nvme:/a'"],
            "expected recompute.mode = \"full\" or zero = 3",
        ),
        (
            vec![
                "parallel.recompute.mode=full",
                "parallel.activation_offload=cpu",
                "run.device=cpu",
            ],
            "parallel.activation_offload: expected none or nvme:PATH with run.device = \"cpu\"",
        ),
        (vec!["parallel.activation_offload=disk"], "separated by commas, found 'disk'"),
        (vec!["parallel.timeout=0s"], "parallel.timeout: expected at least 1s, found 0s"),
    ] {
        let refusal = set(&sets).unwrap_err();
        assert!(refusal.contains(expected), "{sets:?}: {refusal}");
    }
}

/// Colossal-AI's rule: the remainder goes to the last stages. Also thirty layers on four stages, of
/// which Megatron trained only 28.
#[test]
fn all_layers_are_assigned_to_stages() {
    for (sets, expected) in [
        (vec!["parallel.pp=4", "model.layers=30"], vec![7, 7, 8, 8]),
        (vec!["parallel.pp=2", "parallel.layers_per_stage=[1,3]"], vec![1, 3]),
        (
            vec!["model.family=t5", "model.dec_len=16", "model.decoder_layers=3", "parallel.pp=2"],
            vec![3, 4],
        ),
        (
            vec![
                "parallel.pp=2",
                "parallel.virtual_stages=2",
                "parallel.schedule=interleaved",
                "model.layers=9",
            ],
            vec![2, 2, 2, 3],
        ),
    ] {
        let pieces = set(&sets).unwrap().pieces();
        assert_eq!(pieces.iter().map(Range::len).collect::<Vec<_>>(), expected, "{sets:?}");
    }
}

#[test]
fn defaults_of_each_family() {
    use recipe::config::{Activation, MaskLengths, Norm, Objective, Positions};
    let t5 = set(&["model.family=t5", "model.dec_len=32"]).unwrap().resolved();
    let model = &t5.model;
    assert_eq!((model.activation, model.norm), (Some(Activation::GegluTanh), Some(Norm::Rmsnorm)));
    assert_eq!((model.positions, model.bias), (Some(Positions::RelativeBias), Some(false)));
    assert_eq!((model.tie_embeddings, model.norm_eps), (Some(false), Some(1e-6)));
    assert_eq!((model.decoder_layers, model.units(), model.tokens_per_sample()), (Some(4), 8, 96));
    assert_eq!((t5.objective(), t5.tokens_per_step()), (Objective::SpanCorruption, 16 * 96));
    let data = &t5.data;
    assert_eq!((data.mask_prob, data.short_seq_prob), (0.15, 0.1));
    assert_eq!((data.mask_ngram_max, data.mask_lengths), (Some(10), Some(MaskLengths::Geometric)));
    assert_eq!((data.mask_full_words, data.sentence_order), (Some(true), None));
    let triple = set(&["model.family=t5", "model.dec_len=32", "data.objective=encdec"]).unwrap();
    assert_eq!(triple.resolved().data.mask_lengths, None);
    let bert = set(&["model.family=bert"]).unwrap();
    let data = bert.resolved().data;
    assert_eq!((data.mask_ngram_max, data.sentence_order), (Some(3), Some(true)));
    assert_eq!(data.mask_lengths, Some(MaskLengths::ShorterFirst));
    // The folder of Megatron.
    let folders = [&t5, &triple, &bert].map(|config| config.resolved().data.cache_dir);
    let expected = ["T5MaskedWordPieceDataset", "GPTDataset", "BERTMaskedWordPieceDataset"];
    assert_eq!(folders, expected.map(|class| Some(format!("d/cache/{class}_indices"))));
    assert_eq!((bert.model.activation(), bert.model.norm_eps()), (Activation::Gelu, 1e-12));
    assert_eq!((bert.objective(), bert.model.token_types), (Objective::Mlm, 2));
    // The other name of the length of the encoder.
    let named = read(&SMALL.replace("seq_len = 64", "family='t5'\nenc_len = 48\ndec_len = 16"));
    assert_eq!(named.unwrap().model.tokens_per_sample(), 64);
}

/// `--rampup-batch-size 448 448 488280` to 2688, as in Yuan: the sizes equal those of
/// `RampupBatchsizeNumMicroBatchesCalculator` of megatron-core 0.16.1.
#[test]
fn batch_ramps_equal_megatrons() {
    let config = set(&[
        "batch.global=2688",
        "batch.micro=4",
        "batch.rampup={start=448,increment=448,samples=488280}",
        "run.budget={samples=1_000_000}",
    ])
    .unwrap();
    let batch = &config.batch;
    for (samples, expected) in [
        (0, 448),
        (97_655, 448),
        (97_656, 896),
        (195_312, 1344),
        (292_968, 1792),
        (390_624, 2240),
        (488_279, 2240),
        (488_280, 2688),
        (9_000_000, 2688),
    ] {
        assert_eq!(batch.at(samples), expected, "at {samples}");
    }
    // Step by step, as in the training loop.
    let (mut samples, mut steps) = (0, 0);
    while samples + batch.at(samples) <= 1_000_000 {
        assert_eq!((batch.steps_in(samples), batch.samples_after(steps)), (steps, samples));
        samples += batch.at(samples);
        steps += 1;
    }
    assert_eq!((config.steps_total(), config.samples_total()), (steps, samples));
    let by_steps = set(&[
        "batch.global=2688",
        "batch.micro=4",
        "batch.rampup={start=448,increment=448,samples=488280}",
        &format!("run.budget={{steps={steps}}}"),
    ]);
    assert_eq!(by_steps.unwrap().samples_total(), samples);
}

#[test]
fn keys_of_other_objectives_are_refused() {
    let (t5, bert) = (["model.family=t5", "model.dec_len=32"], ["model.family=bert"]);
    let triple = [&t5[..], &["data.objective=encdec"]].concat();
    for (sets, expected) in [
        (
            &[][..],
            "data.mask_ngram_max=3: data.mask_ngram_max: only valid with objective \
             \"span-corruption\"",
        ),
        (&[], "data.mask_lengths=geometric: data.mask_lengths: only valid with objective"),
        (&triple, "data.mask_full_words=true: data.mask_full_words: only valid with objective"),
        (&t5, "data.sentence_order=false: data.sentence_order: only valid with objective \"mlm\""),
        (
            &t5,
            "data.reset_at_document=true: data.reset_at_document: only valid with objective \"lm\" \
             or \"encdec\"",
        ),
        (
            &bert,
            "data.mask_eod_loss=true: data.mask_eod_loss: only valid with objective \"lm\" or \
             \"encdec\"",
        ),
        (&bert, "data.objective=encdec: data.objective: not supported by model.family"),
        (&bert, "data.mask_prob=0: data.mask_prob: expected more than 0"),
        (&bert, "data.mask_ngram_max=0: data.mask_ngram_max: expected 1 to 1024, found 0"),
        (
            &bert,
            "data.mask_lengths=short: data.mask_lengths: expected shorter-first, \
             longer-first or geometric, found 'short'",
        ),
        (&bert, "run.seed=2147483647: run.seed: expected 0 to 2147483646, found 2147483647"),
        (&bert, "model.token_types=1: model.token_types: expected 2 to 1024, found 1"),
        (&bert, "model.seq_len=4: model.seq_len: expected 5 to 1048576, found 4"),
        (&bert, "data.special.mask=50257: data.special.mask: expected 0 to 50256, found 50257"),
        (&bert, "data.special.msk=1: data.special.msk: unknown key (hint: did you mean 'mask'?)"),
        (
            &t5,
            "data.special.sentinels=[9]: data.special.sentinels: expected an array of \
             length 2, found a list of 1",
        ),
        // Nine of 64 tokens are masked, in at least one span, after BOS and a sentinel.
        (
            &t5,
            "model.dec_len=10: model.dec_len: expected at least 11, found 10: of 64 tokens \
             9 are masked",
        ),
        (&triple, "model.dec_len=1: model.dec_len: expected 2 to 1048576, found 1"),
    ] {
        let (change, expected) =
            expected.split_once(": ").expect("a change and the expected error");
        let refusal = set(&[sets, &[change]].concat()).unwrap_err();
        assert!(refusal.contains(&format!("cannot use --set: {expected}")), "{change}: {refusal}");
    }
    for sets in [
        [&t5[..], &["model.dec_len=11"]].concat(),
        [&bert[..], &["data.sentence_order=false", "model.token_types=1"]].concat(),
        [&triple[..], &["data.mask_eod_loss=true", "data.special.sentinels=[9,3]"]].concat(),
    ] {
        let config = set(&sets).unwrap();
        let again = Config::from_toml("again", &config.resolved().to_toml()).unwrap();
        assert_eq!(again, config.resolved(), "what is recorded can be read again");
    }
}
