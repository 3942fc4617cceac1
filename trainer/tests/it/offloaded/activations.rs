//! Inputs of layers that are spilled to a disk until their backward pass: the bytes are those of
//! the plan, and the gradients are the same.

use std::sync::Arc;

use crate::families::{
    ANSWER, BERT, ROWS, SEQ, T5, VOCAB, bert_batch, gpt_batch, t5_batch, values, weight,
};
use ckpt::offload::{Folder, Spill, SpillOptions};
use storage::Key;
use tch::{Kind, Tensor};
use trainer::config::Config;
use trainer::model::{ActivationStore, Micro, Model, Stage, Tp};
use trainer::plan::{PlanInputs, RunPlan};

fn config(text: &str, pp: usize) -> Config {
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 1 }} }}
         data = {{ train = 'unused' }}
         batch = {{ global = {ROWS}, micro = {ROWS} }}
         optim = {{ lr = {{ peak = 0.001 }} }}
         eval = {{ every = 0 }}
         parallel = {{ pp = {pp}, recompute = {{ mode = 'full' }}, activation_offload = 'nvme:x' }}
         [model]
         vocab = {VOCAB}
         seq_len = {SEQ}
         layers = 4
         hidden = 16
         heads = 2
         ffn = 24
         {text}"
    );
    Config::from_toml("test", &text).unwrap()
}

/// The bytes that each stage has spilled, and the gradients of all.
fn compute(config: &Config, micro: &Micro, disk: bool, kind: Kind) -> (Vec<u64>, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let model = Model::new(&config.model, 1);
    let (mut passes, mut outs, mut moved) = (Vec::new(), Vec::<Tensor>::new(), Vec::new());
    for units in config.pieces() {
        let folder = Folder { store: Arc::clone(&store), key: Key::root() };
        // Two buffers, so that nearly all is on the disk in between.
        let options = SpillOptions { extent_bytes: 4096, buffers: 2, threads: 1 };
        let spill = Arc::new(Spill::open(vec![folder], options).unwrap());
        let keep =
            if disk { ActivationStore::Disk(Arc::clone(&spill)) } else { ActivationStore::Here };
        let stage = model.stage(units, &Tp::alone(), |_| true).keeping(&keep);
        let params: Vec<Tensor> = stage.params().iter().map(|at| own(&stage, *at)).collect();
        let leaves = stage.leaves(&params, kind).unwrap();
        // As inputs from another rank, they share their memory with no other tensor.
        let carried = std::mem::take(&mut outs);
        let mut pass = stage.forward(&leaves, micro, carried).unwrap();
        outs = pass.outs().iter().map(Tensor::copy).collect();
        if stage.units().end < model.units() {
            pass.forget_outs().unwrap();
        }
        moved.push(spill.report().put_bytes);
        passes.push((stage, leaves, pass));
    }
    let (last, leaves, _) = passes.last().unwrap();
    let mut grads = last.loss_and_grad(leaves, micro, &outs).unwrap().outs;
    let mut all = Vec::new();
    for (stage, leaves, pass) in passes.into_iter().rev() {
        pass.prefetch();
        grads = stage.backward(&leaves, micro, pass, grads, &mut |_| Ok(())).unwrap();
        let taken = leaves.iter().filter_map(|leaf| bridge::take_grad(leaf).unwrap());
        all.extend(taken.map(|grad| values(&grad)));
    }
    (moved, all)
}

fn own(stage: &Stage, at: usize) -> Tensor {
    let spec = &stage.model().params()[at];
    let whole = weight(&spec.name, &spec.shape);
    let padding = spec.local_shape(1)[0] - spec.shape[0];
    let mut shape = spec.shape.clone();
    shape[0] = padding;
    Tensor::cat(&[whole, Tensor::zeros(&shape, (Kind::Float, tch::Device::Cpu))], 0)
}

fn check(text: &str, micro: &Micro, stages: &[usize], inputs: &[u64]) {
    for (pp, expected) in stages.iter().zip(inputs) {
        let config = config(text, *pp);
        let plan = RunPlan::new(&config, &PlanInputs::default());
        for kind in [Kind::Float, Kind::BFloat16] {
            let (none, here) = compute(&config, micro, false, kind);
            let (moved, spilled) = compute(&config, micro, true, kind);
            assert!(none.iter().all(|bytes| *bytes == 0));
            assert!(!here.is_empty() && here == spilled, "{text} on {pp} stages: other gradients");
            if kind == Kind::Float {
                let planned: Vec<u64> = plan.stages.iter().map(|it| it.moved_bytes).collect();
                assert_eq!(moved, planned, "{text} on {pp} stages");
                assert_eq!(moved.iter().sum::<u64>(), *expected, "{text} on {pp} stages");
            }
        }
    }
}

/// Bytes of a text, and of an answer, between two layers.
const TEXT: u64 = (ROWS * SEQ * 16 * 4) as u64;
const ANSWER_BYTES: u64 = (ROWS * ANSWER * 16 * 4) as u64;

#[test]
fn gpt_and_bert() {
    check("", &gpt_batch(), &[1, 2, 4], &[3 * TEXT; 3]);
    check(BERT, &bert_batch(), &[1, 2], &[3 * TEXT; 2]);
}

/// Four layers and three: the first two layers of the decoder share the encoder output, which stays
/// in memory. A last layer alone in its stage is the only one to have it.
#[test]
fn t5() {
    let most = 3 * TEXT + 2 * ANSWER_BYTES;
    check(T5, &t5_batch(), &[1, 2, 3], &[most; 3]);
    check(T5, &t5_batch(), &[7], &[most + TEXT]);
    check(&T5.replace("decoder_layers = 3", "decoder_layers = 1"), &t5_batch(), &[1], &[4 * TEXT]);
}
