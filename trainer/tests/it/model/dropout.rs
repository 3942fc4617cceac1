//! Dropout is a function only of the seed, the sample and the place: not of the division of samples
//! into micro-batches. (Nor of the layout: `parallel/layouts.rs`. Its values and places:
//! `families.rs`.)

use loader::Batch;
use tch::{Kind, Tensor};
use trainer::Trainer;
use trainer::config::Config;

const SEQ: usize = 8;

fn trainer(seed: u64, dropout: f64) -> Trainer {
    let text = format!(
        "run = {{ dir = 'unused', seed = {seed}, budget = {{ steps = 1 }} }}
         model = {{ layers = 2, hidden = 16, heads = 2, vocab = 50, seq_len = {SEQ},
                    dropout = {dropout} }}
         data = {{ train = 'unused' }}
         batch = {{ global = 4, micro = 4 }}
         optim = {{ lr = {{ peak = 0.001 }} }}"
    );
    let text = text.replace(",\n ", ", ");
    Trainer::new(&Config::from_toml("test", &text).unwrap()).unwrap()
}

/// Some samples of the order; their tokens repeat, so that samples differ in their number alone.
fn batch(first_sample: u64, rows: usize) -> Batch {
    let tokens: Vec<i64> = (0..rows * SEQ).map(|at| (at % SEQ * 7 % 50) as i64).collect();
    Batch {
        first_sample,
        rows,
        seq_len: SEQ,
        labels: tokens.iter().map(|token| (token + 1) % 50).collect(),
        tokens,
        loss_mask: vec![1.0; rows * SEQ],
        ..Batch::default()
    }
}

fn gradient(trainer: &Trainer, batches: &[Batch]) -> Tensor {
    let flat = trainer.gradient(batches).unwrap().grads.into_iter().map(|grad| grad.flatten(0, -1));
    Tensor::cat(&flat.collect::<Vec<_>>(), 0)
}

/// The norm of the difference, in units of the first's.
fn apart(one: &Tensor, other: &Tensor) -> f64 {
    ((one - other).norm() / one.norm()).to_kind(Kind::Double).double_value(&[])
}

#[test]
fn micro_batches_of_another_size_drop_the_same() {
    let trainer = trainer(1, 0.3);
    let whole = gradient(&trainer, &[batch(100, 4)]);
    let parts = [batch(100, 1), batch(101, 2), batch(103, 1)];
    let same = apart(&whole, &gradient(&trainer, &parts));
    assert!(same < 1e-5, "they are {same} apart");
    // A repetition drops the same; other samples drop other elements.
    assert_eq!(apart(&whole, &gradient(&trainer, &[batch(100, 4)])), 0.0);
    let other = apart(&whole, &gradient(&trainer, &[batch(104, 4)]));
    assert!(other > 0.1, "they are {other} apart");
}

#[test]
fn another_seed_drops_other_elements() {
    let of = |seed, dropout| {
        let mut trainer = trainer(seed, dropout);
        for (param, value) in trainer.state_mut()[0].iter_mut().zip(1..) {
            let wave = Tensor::arange(param.numel() as i64, (Kind::Float, param.device()));
            param.copy_(&((wave * f64::from(value)).sin() * 0.1).view_as(param));
        }
        trainer.loaded().unwrap();
        gradient(&trainer, &[batch(0, 4)])
    };
    assert_eq!(apart(&of(1, 0.0), &of(2, 0.0)), 0.0);
    assert!(apart(&of(1, 0.3), &of(2, 0.3)) > 0.1);
}

/// The remaining elements are scaled up: the mean over many masks is that without dropout.
#[test]
fn dropout_keeps_the_mean_gradient() {
    let (none, some) = (trainer(1, 0.0), trainer(1, 0.1));
    let whole = gradient(&none, &[batch(0, 512)]);
    let mean = apart(&whole, &gradient(&some, &[batch(0, 512)]));
    // The network is nearly linear where weights are small; the noise is that of 512 samples.
    assert!(mean < 0.15, "they are {mean} apart");
}
