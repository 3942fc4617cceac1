//! Every family against Hugging Face's or Megatron's model of it (`reference/`): logits, loss and
//! each gradient; and the equality of all divisions of a model.
//!
//! Two computations of one value are compared in f64, where a wrong formula and rounding are ten
//! orders of magnitude apart on every processor. In f32 they are compared again, with a limit that
//! a computation in fewer bits (TF32, bf16) exceeds.

use crate::families;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::families::{
    ANSWER, BERT, LLAMA, ROWS, T5, T5_MEGATRON, T5_OLD, bert_batch, check_close, config, gpt_batch,
    t5_batch, t5_batch_where, values, weight,
};
use bridge::dist::{Group, GroupOptions, Reduce, Store};
use ckpt::layout::TensorSplit;
use tch::{Kind, Tensor};
use trainer::config::ModelConfig;
use trainer::model::{Micro, Model, ParamSpec, Stage, Tp};

/// Longer than any operation takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The part of a parameter that one of `tp` ranks has, with padding, in memory of its own.
fn part(spec: &ParamSpec, whole: &Tensor, rank: i64, tp: i64) -> Tensor {
    let along = |x: &Tensor, axis: usize| {
        let len = x.size()[axis] / tp;
        x.narrow(axis as i64, rank * len, len)
    };
    let part = match &spec.split {
        TensorSplit::Replicate => whole.shallow_clone(),
        TensorSplit::Axis(axis) => along(whole, *axis),
        TensorSplit::Padded { rows } => {
            let mut shape = spec.shape.clone();
            shape[0] = *rows as i64 - shape[0];
            // The values in the padding of the vocabulary must not matter.
            let padding = Tensor::full(&shape, 0.75, (Kind::Float, tch::Device::Cpu));
            along(&Tensor::cat(&[whole, &padding], 0), 0)
        }
        TensorSplit::Fused { .. } if tp == 1 => whole.shallow_clone(),
        TensorSplit::Fused { axis, blocks, .. } => {
            let blocks = whole.chunk(blocks.len() as i64, *axis as i64);
            let parts: Vec<Tensor> = blocks.iter().map(|block| along(block, *axis)).collect();
            if *axis == 0 { Tensor::cat(&parts, 0) } else { Tensor::stack(&parts, 0) }
        }
    };
    assert_eq!(part.size(), spec.local_shape(tp as usize), "{}", spec.name);
    part.copy().contiguous()
}

/// The weights of the references, as one rank has them.
fn params(stage: &Stage, tp: &Tp) -> Vec<Tensor> {
    let specs = stage.model().params();
    let own = |at: &usize| {
        let spec = &specs[*at];
        part(spec, &weight(&spec.name, &spec.shape), tp.rank as i64, tp.size as i64)
    };
    stage.params().iter().map(own).collect()
}

/// All of a model, as one rank has it.
fn whole(config: &ModelConfig, tp: &Tp) -> Stage {
    let model = Model::new(config, tp.size as u64);
    model.stage(0..model.units(), tp, |unit| !tp.is_alone() && unit == 1)
}

/// The kind of gradients in a network of `kind`.
fn at_least_f32(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}

/// The results of a stage, or of a chain of them, for a micro-batch.
struct Made {
    loss: f64,
    outs: Vec<Tensor>,
    logits: Tensor,
    /// By parameter of the model, without padding.
    grads: Vec<Tensor>,
}

impl Made {
    /// Another reference to it, for another thread.
    fn parts(&self) -> Self {
        let all = |list: &[Tensor]| list.iter().map(Tensor::shallow_clone).collect();
        let logits = self.logits.shallow_clone();
        Made { loss: self.loss, outs: all(&self.outs), logits, grads: all(&self.grads) }
    }
}

/// Computes a micro-batch on a model that is cut into stages of `cuts` units.
fn compute(config: &ModelConfig, micro: &Micro, cuts: &[usize], kind: Kind) -> Made {
    let model = Model::new(config, 1);
    let mut first = 0;
    let stages = cuts.iter().map(|units| {
        first += units;
        // Every other unit is recomputed.
        model.stage(first - units..first, &Tp::alone(), |unit| cuts.len() > 1 && unit % 2 == 0)
    });
    let stages: Vec<Stage> = stages.collect();
    assert_eq!(first, model.units());
    let leaves: Vec<Vec<Tensor>> = stages
        .iter()
        .map(|stage| stage.leaves(&params(stage, &Tp::alone()), kind).unwrap())
        .collect();
    let mut passes = Vec::new();
    let mut outs: Vec<Tensor> = Vec::new();
    for (stage, leaves) in stages.iter().zip(&leaves) {
        let shapes: Vec<Vec<i64>> = outs.iter().map(Tensor::size).collect();
        assert_eq!(shapes, stage.carried(ROWS as i64));
        let pass = stage.forward(leaves, micro, outs).unwrap();
        outs = pass.outs().iter().map(Tensor::copy).collect();
        passes.push(pass);
    }
    let (last, last_leaves) = (stages.last().unwrap(), leaves.last().unwrap());
    let head = last.loss_and_grad(last_leaves, micro, &outs).unwrap();
    assert_eq!(last.loss(last_leaves, micro, &outs).unwrap(), head.loss);
    let logits = last.logits(last_leaves, &outs[0]).unwrap();

    // Gradients of uses, by their place in the model.
    let mut uses: Vec<Option<Tensor>> = model.uses().iter().map(|_| None).collect();
    let (mut grads, mut of_head) = (head.outs, head.uses);
    for ((stage, leaves), pass) in stages.iter().zip(&leaves).zip(passes).rev() {
        grads = stage.backward(leaves, micro, pass, grads, &mut |_| Ok(())).unwrap();
        let taken = take_grads(leaves, std::mem::take(&mut of_head));
        for (at, grad) in stage.uses().iter().zip(taken) {
            assert!(uses[*at].replace(grad).is_none(), "one stage has a use");
        }
    }
    let uses = uses.into_iter().map(|grad| grad.expect("some stage has it")).collect();
    let whole = model.stage(0..model.units(), &Tp::alone(), |_| false);
    let joined = join(&whole, uses);
    let grads = model.params().iter().zip(joined).map(|(spec, grad)| {
        assert_eq!(grad.kind(), at_least_f32(kind));
        grad.narrow(0, 0, spec.shape[0])
    });
    Made { loss: head.loss.double_value(&[]), outs, logits, grads: grads.collect() }
}

/// Of an f32 result, in units of the largest element: TF32, which has 11 significant bits, is off
/// by twice as much, and sums of a few dozen products in f32 by a tenth of it, however a processor
/// orders them.
const F32_ERROR_MAX: f32 = 2e-4;

/// Of an f64 result against a file, whose values are f32, as is the softmax of T5 in transformers.
const FILE_ERROR_MAX: f32 = 1e-5;

/// Compares all results with a file.
fn check(file: &[u8], text: &str, micro: &Micro) {
    check_within(FILE_ERROR_MAX, file, text, micro);
}

fn check_within(file_error_max: f32, file: &[u8], text: &str, micro: &Micro) {
    check_kind(Kind::Double, file_error_max, file, text, micro);
    check_kind(Kind::Float, F32_ERROR_MAX, file, text, micro);
}

fn check_kind(kind: Kind, tolerance: f32, file: &[u8], text: &str, micro: &Micro) {
    let expected = families::read(file);
    let config = config(text);
    let made = compute(&config, micro, &[Model::new(&config, 1).units()], kind);
    check_close("loss", &[made.loss as f32], &expected["loss"], tolerance);
    check_close("logits", &values(&made.logits), &expected["logits"], tolerance);
    if let Some(order) = expected.get("order") {
        check_close("order", &values(&made.outs[1]), order, tolerance);
    }
    let model = Model::new(&config, 1);
    for (spec, grad) in model.params().iter().zip(&made.grads) {
        check_close(&spec.name, &values(grad), &expected[&spec.name], tolerance);
    }
    let others = 2 + usize::from(expected.contains_key("order"));
    assert_eq!(expected.len(), model.params().len() + others, "every gradient was compared");
}

#[test]
fn llama_matches_transformers() {
    check(include_bytes!("../../golden/llama.safetensors"), LLAMA, &gpt_batch());
}

#[test]
fn t5_v1_1_matches_transformers() {
    check(include_bytes!("../../golden/t5_v1_1.safetensors"), T5, &t5_batch());
}

#[test]
fn t5_v1_0_matches_transformers() {
    check(include_bytes!("../../golden/t5_v1_0.safetensors"), T5_OLD, &t5_batch());
}

/// Learned positions and a head with a bias (`reference/t5_megatron.py`).
#[test]
fn t5_matches_megatron() {
    check(include_bytes!("../../golden/t5_megatron.safetensors"), T5_MEGATRON, &t5_batch());
}

#[test]
fn bert_matches_transformers() {
    check(include_bytes!("../../golden/bert.safetensors"), BERT, &bert_batch());
}

/// More keys of a model: what `reference/dropout.py` gives the modules of GPT-2 and BERT.
const DROPS: &str = "dropout = 0.3\nattention_dropout = 0.2";

/// In training, with the same numbers dropped at the same positions (`reference/dropout.py`).
#[test]
fn dropout_matches_transformers() {
    check(include_bytes!("../../golden/dropout_gpt2.safetensors"), DROPS, &gpt_batch());
    let t5 = format!("{T5}\ndropout = 0.25");
    // The scores of T5 are large, because they are not scaled, and so are errors of an f32 softmax.
    check_within(5e-5, include_bytes!("../../golden/dropout_t5.safetensors"), &t5, &t5_batch());
    let bert = format!("{BERT}\n{DROPS}");
    check(include_bytes!("../../golden/dropout_bert.safetensors"), &bert, &bert_batch());
}

/// A pass without a backward pass is not training.
#[test]
fn inference_drops_nothing() {
    let cases: [(&str, MakeMicro); 3] = [("", gpt_batch), (T5, t5_batch), (BERT, bert_batch)];
    for (text, batch) in cases {
        let outs = [text.to_owned(), format!("{text}\n{DROPS}")].map(|text| {
            let stage = whole(&config(&text), &Tp::alone());
            let leaves = stage.leaves(&params(&stage, &Tp::alone()), Kind::Float).unwrap();
            let trained = stage.forward(&leaves, &batch(), Vec::new()).unwrap().outs()[0].copy();
            (values(&stage.infer(&leaves, &batch(), Vec::new()).unwrap()[0]), values(&trained))
        });
        assert_eq!(outs[0].0, outs[1].0, "{text}");
        assert_ne!(outs[0].1, outs[1].1, "{text}: dropout has an effect in training");
    }
}

type MakeMicro = fn() -> Micro;

/// Wherever a model is cut, and whatever is recomputed: the same bits.
#[test]
fn cuts_change_no_bit() {
    let (t5, bert) = (&*format!("{T5}\n{DROPS}"), &*format!("{BERT}\n{DROPS}"));
    let cases: [(&str, MakeMicro, &[&[usize]]); 8] = [
        (LLAMA, gpt_batch, &[&[1, 1]]),
        ("", gpt_batch, &[&[1, 1]]),
        (DROPS, gpt_batch, &[&[1, 1]]),
        (T5, t5_batch, &[&[2, 3], &[1, 2, 2], &[3, 2], &[4, 1], &[1, 1, 1, 1, 1]]),
        (t5, t5_batch, &[&[1, 1, 1, 1, 1]]),
        (T5_MEGATRON, t5_batch, &[&[2, 3], &[1, 1, 1, 1, 1]]),
        (BERT, bert_batch, &[&[1, 1]]),
        (bert, bert_batch, &[&[1, 1]]),
    ];
    for (text, batch, cuts) in cases {
        let (config, micro) = (config(text), batch());
        for kind in [Kind::Float, Kind::BFloat16] {
            let whole = compute(&config, &micro, &[Model::new(&config, 1).units()], kind);
            for cuts in cuts {
                let cut = compute(&config, &micro, cuts, kind);
                assert_eq!(cut.loss.to_bits(), whole.loss.to_bits(), "{text} {cuts:?}");
                for (at, (a, b)) in cut.grads.iter().zip(&whole.grads).enumerate() {
                    let name = Model::new(&config, 1).params()[at].name.clone();
                    assert_eq!(values(a), values(b), "{name}, cut {cuts:?}, {kind:?}");
                }
            }
        }
    }
}

/// A micro-batch may be only padding while others of its step are not.
#[test]
fn no_counted_tokens_give_zero_loss() {
    let config = config(T5);
    let made = compute(&config, &t5_batch_where(&[false; ROWS * ANSWER]), &[5], Kind::Float);
    assert_eq!((made.loss, made.logits.size()[0]), (0.0, 0));
    for (spec, grad) in Model::new(&config, 1).params().iter().zip(&made.grads) {
        assert!(values(grad).iter().all(|value| *value == 0.0), "{}", spec.name);
    }
}

/// Runs `body` on ranks that are threads, with a group of all of them.
fn ranks<T: Send>(size: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let server = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    let (port, members) = (server.port(), (0..size).collect::<Vec<usize>>());
    std::thread::scope(|scope| {
        let spawn = |rank| {
            let (body, members) = (&body, &members);
            scope.spawn(move || {
                let store = Store::connect("127.0.0.1", port, PATIENCE).unwrap();
                let options = GroupOptions::local(PATIENCE);
                let group = Group::gloo(&store, "tp", rank, members, &options).unwrap();
                let result = body(&group);
                group.barrier().unwrap();
                result
            })
        };
        let ranks: Vec<_> = (0..size).map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The gradients of a micro-batch, f32 or f64, one for each use of a stage; `head` has those of its
/// head.
fn take_grads(leaves: &[Tensor], head: Vec<(usize, Tensor)>) -> Vec<Tensor> {
    let take = |leaf: &Tensor| {
        let grad = bridge::take_grad(leaf).unwrap().unwrap_or_else(|| leaf.zeros_like());
        grad.to_kind(at_least_f32(leaf.kind()))
    };
    let mut grads: Vec<Tensor> = leaves.iter().map(take).collect();
    for (at, grad) in head {
        grads[at] = grad;
    }
    grads
}

/// Joins gradients of uses to those of parameters.
fn join(stage: &Stage, grads: Vec<Tensor>) -> Vec<Tensor> {
    let mut joined = BTreeMap::<usize, Tensor>::new();
    for (at, grad) in stage.uses().iter().zip(grads) {
        let param = stage.model().uses()[*at].param;
        let sum = joined.remove(&param).map_or_else(|| grad.shallow_clone(), |sum| sum + &grad);
        joined.insert(param, sum);
    }
    joined.into_values().collect()
}

/// Of f64 gradients of tensor parallel ranks, in units of the largest element.
const F64_ERROR_MAX: f64 = 1e-11;

/// Loss and gradients on one of some tensor parallel ranks, each against its part of the whole.
fn check_rank(tp: &Tp, config: &ModelConfig, micro: &Micro, expected: &Made, kind: Kind) {
    let error_max = if kind == Kind::Double { F64_ERROR_MAX } else { f64::from(F32_ERROR_MAX) };
    let stage = whole(config, tp);
    let model = stage.model();
    let leaves = stage.leaves(&params(&stage, tp), kind).unwrap();
    let pass = stage.forward(&leaves, micro, Vec::new()).unwrap();
    let head = stage.loss_and_grad(&leaves, micro, pass.outs()).unwrap();
    let loss = head.loss.double_value(&[]);
    assert!(
        (loss / expected.loss - 1.0).abs() <= error_max,
        "loss {loss}, expected {}",
        expected.loss
    );
    stage.backward(&leaves, micro, pass, head.outs, &mut |_| Ok(())).unwrap();
    let mut grads = take_grads(&leaves, head.uses);
    let group = tp.group.as_ref().expect("several ranks");
    for (at, grad) in grads.iter_mut().enumerate() {
        if stage.is_partial(at) {
            *grad = grad.contiguous();
            group.all_reduce(grad, Reduce::Sum).unwrap();
        }
    }
    let grads = join(&stage, grads);
    for ((spec, grad), whole) in model.params().iter().zip(&grads).zip(&expected.grads) {
        let expected = part(spec, whole, tp.rank as i64, tp.size as i64);
        // Some gradients are 0 except for rounding: a key bias moves all scores of a row equally.
        let scale = whole.abs().max().double_value(&[]).max(1e-2);
        // Padding has no gradient, whatever the copy of the whole has there.
        let expected = if matches!(spec.split, TensorSplit::Padded { .. }) {
            let rows = (spec.shape[0] - tp.rank as i64 * grad.size()[0]).clamp(0, grad.size()[0]);
            let padding = values(&grad.narrow(0, rows, grad.size()[0] - rows));
            assert!(padding.iter().all(|value| *value == 0.0), "{}: padding", spec.name);
            let zeros = expected.zeros_like();
            zeros.narrow(0, 0, rows).copy_(&expected.narrow(0, 0, rows));
            zeros
        } else {
            expected
        };
        let error = (grad - expected).abs().max().double_value(&[]);
        let what = format!("{} on rank {} of {}", spec.name, tp.rank, tp.size);
        assert!(error <= error_max * scale, "{what}: off by {error:e} of {scale:e}, {kind:?}");
    }
}

/// Tensor and sequence parallel ranks have the same results as one rank, except for the rounding of
/// divided sums.
#[test]
fn tensor_parallel_ranks_agree_with_one() {
    // As the trainer does, and with as many threads as each rank has: sums are divided equally.
    bridge::runtime::set_deterministic().unwrap();
    tch::set_num_threads(1);
    let (t5, bert) = (&*format!("{T5}\n{DROPS}"), &*format!("{BERT}\n{DROPS}"));
    let cases: [(&str, MakeMicro); 9] = [
        ("", gpt_batch),
        (DROPS, gpt_batch),
        (LLAMA, gpt_batch),
        (T5, t5_batch),
        (t5, t5_batch),
        (T5_OLD, t5_batch),
        (T5_MEGATRON, t5_batch),
        (BERT, bert_batch),
        (bert, bert_batch),
    ];
    for (text, batch) in cases {
        let mut config = config(text);
        (config.heads, config.head_dim) = (4, Some(6));
        let units = Model::new(&config, 1).units();
        for kind in [Kind::Double, Kind::Float] {
            let expected = Mutex::new(compute(&config, &batch(), &[units], kind));
            for (size, sequence) in [(2, false), (2, true), (4, false), (4, true)] {
                ranks(size, |group| {
                    let whole = expected.lock().unwrap().parts();
                    check_rank(&Tp::of(group, sequence), &config, &batch(), &whole, kind);
                });
            }
        }
    }
}
