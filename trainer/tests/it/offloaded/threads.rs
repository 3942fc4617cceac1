//! An update of offloaded state has libtorch's bits, with any number of threads on either side.

use bridge::{AdamWStep, Moments, fused_adamw};
use ckpt::layout::{DeviceMesh, Layout, Param, TensorSplit};
use ckpt::offload::{AdamW, Offload, OffloadOptions, Update, WeightsOut};
use ckpt::{Dtype, Group};
use serde_json::Value;
use tch::Tensor;
use trainer::rng::Stream;

/// In the first update the squares are one product of the gradient, which can be rounded in only
/// one way. In the second update they are not.
fn steps() -> [AdamWStep; 2] {
    [1, 2].map(|step| AdamWStep {
        step,
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        weight_decay: 0.1,
        eps: 1e-8,
        grad_divisor: 1.7,
    })
}

fn random(name: &str, len: i64) -> Tensor {
    let mut values = vec![0.0; len as usize];
    Stream::new(12, name).fill_normal(0, 1.0, &mut values);
    Tensor::from_slice(&values)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = Vec::<f32>::try_from(tensor).expect("f32");
    values.into_iter().map(f32::to_bits).collect()
}

/// Two updates by libtorch.
fn by_libtorch(weights: &Tensor, grads: &[Tensor; 2]) -> [Vec<u32>; 3] {
    let mut params = [weights.copy()];
    let (mut avgs, mut sqs) = ([weights.zeros_like()], [weights.zeros_like()]);
    for (step, grad) in steps().iter().zip(grads) {
        let mut moments = Moments { exp_avgs: &mut avgs, exp_avg_sqs: &mut sqs };
        fused_adamw(&mut params, &mut [grad.copy()], &mut moments, step).unwrap();
    }
    [&params[0], &avgs[0], &sqs[0]].map(bits)
}

/// The same by a state in host memory.
fn by_state(weights: &Tensor, grads: &[Tensor; 2], threads: usize) -> [Vec<u32>; 3] {
    let (name, shape) = ("weight".to_owned(), vec![weights.numel() as u64]);
    let param = Param { name, shape, split: TensorSplit::Replicate, stages: vec![0] };
    let groups = [Group::Model, Group::ExpAvg, Group::ExpAvgSq].map(|group| (group, Dtype::F32));
    let layout = Layout::new(DeviceMesh::default(), vec![param], &groups).unwrap();
    let plan = ckpt::offload::plan(&layout).unwrap();
    let options = OffloadOptions { threads, ..OffloadOptions::default() };
    let mut state = Offload::in_memory(plan, &layout, 0, options).unwrap();
    state.fill(&[bridge::bytes(weights).unwrap()], 0, Value::Null).unwrap();
    for (step, grad) in steps().into_iter().zip(grads) {
        let AdamWStep { step, lr, beta1, beta2, weight_decay, eps, grad_divisor } = step;
        let adamw = AdamW { step, lr, beta1, beta2, eps, grad_divisor };
        let weights = WeightsOut { dtype: Dtype::F32, bytes: &mut [] };
        let (grad, grad_dtype) = (bridge::bytes(grad).unwrap(), Dtype::F32);
        let update = Update { grad, grad_dtype, weight_decay, weights };
        state.step(&adamw, vec![update], Value::Null).unwrap();
    }
    let held = state.held().expect("it is in memory");
    let held: [&[u8]; 3] = held.try_into().expect("weights and both moments");
    held.map(|bytes| {
        let numbers = bytes.as_chunks::<4>().0.iter();
        numbers.map(|bytes| u32::from_le_bytes(*bytes)).collect()
    })
}

/// Whether libtorch's AdamW fuses products with additions, as that of `ckpt` does: its code for
/// processors without AVX2 does not, and then the two round differently.
pub fn is_fused() -> bool {
    let weights = Tensor::zeros([64], (tch::Kind::Float, tch::Device::Cpu));
    let grads = [random("first", 64), random("second", 64)];
    let [_, found, _] = by_libtorch(&weights, &grads);
    let [first, second] = grads.map(|grad| Vec::<f32>::try_from(grad).expect("f32"));
    let second_means = |add: fn(f32, f32, f32) -> f32| -> Vec<u32> {
        let lerp = (1.0 - steps()[0].beta1) as f32;
        let divisor = steps()[0].grad_divisor as f32;
        let mean = |(first, second): (&f32, &f32)| {
            let mean = lerp * (first / divisor);
            add(lerp, second / divisor - mean, mean).to_bits()
        };
        first.iter().zip(&second).map(mean).collect()
    };
    let (fused, apart) = (second_means(f32::mul_add), second_means(|a, b, c| a * b + c));
    assert!(fused != apart && (found == fused || found == apart), "libtorch computes otherwise");
    found == fused
}

/// Why a test of equal bits is skipped, if it is.
pub const NOT_FUSED: &str = "SKIPPED: libtorch has no AVX2 here, and its AdamW rounds differently";

/// libtorch rounds the squares of a parameter's last elements differently from those before. Its
/// threads' parts end at multiples of 16 elements, so only the last part has such an end.
#[test]
fn threads_change_no_bit() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    for len in [1, 15, 33, 1_000, 4_099, 50_257, 65_536, 300_007, 1_100_001] {
        let weights = random("weights", len);
        let grads = [random("first", len), random("second", len)];
        let own = [1, 3].map(|threads| by_state(&weights, &grads, threads));
        for threads in [1, 2, 3, 4, 7] {
            tch::set_num_threads(threads);
            assert_eq!(tch::get_num_threads(), threads);
            let expected = by_libtorch(&weights, &grads);
            assert!(
                own.iter().all(|found| *found == expected),
                "{len} elements, {threads} threads"
            );
        }
    }
    tch::set_num_threads(1);
}
