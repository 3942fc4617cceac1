//! The bridge against what `tch` itself can do, and against arithmetic in f64.

use bridge::{AdamWStep, Moments, backward, bytes, bytes_mut, fused_adamw, runtime, take_grad};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Numbers that are spread out and the same on every machine.
fn spread(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(tensor.flatten(0, -1)).expect("f32 on the CPU")
}

#[test]
fn backward_from_gradients_is_that_of_the_dot_product() {
    let x = Tensor::from_slice(&spread(12, 1)).view([3, 4]);
    let seed = Tensor::from_slice(&spread(12, 2)).view([3, 4]);
    let leaf = |x: &Tensor| x.copy().set_requires_grad(true);
    let (a, b) = (leaf(&x), leaf(&x));
    backward(&[a.tanh() * &a], std::slice::from_ref(&seed)).unwrap();
    (b.tanh() * &b * &seed).sum(Kind::Float).backward();
    assert_eq!(values(&a.grad()), values(&b.grad()));
}

#[test]
fn gradients_are_taken_not_copied() {
    let w = Tensor::from_slice(&[2.0_f32, 3.0]).set_requires_grad(true);
    assert!(take_grad(&w).unwrap().is_none());
    let ones = Tensor::ones([2], F32);
    backward(&[&w * 5.0], std::slice::from_ref(&ones)).unwrap();
    assert_eq!(values(&take_grad(&w).unwrap().unwrap()), [5.0, 5.0]);
    assert!(take_grad(&w).unwrap().is_none(), "it was taken before");
    backward(&[&w * 7.0], &[ones]).unwrap();
    assert_eq!(values(&take_grad(&w).unwrap().unwrap()), [7.0, 7.0], "not accumulated");
}

#[test]
fn errors_come_back_as_one_line() {
    let plain = Tensor::ones([2], F32);
    let error = backward(std::slice::from_ref(&plain), std::slice::from_ref(&plain)).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("cannot run backward: "), "{text}");
    assert!(text.contains("does not require grad"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let error = backward(&[plain], &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot run backward: expected lists of equal length, found [1, 0]"
    );
}

/// One AdamW update as in its paper (Loshchilov and Hutter 2019, algorithm 2).
fn adamw_f64(p: &mut f64, g: f64, m: &mut f64, v: &mut f64, update: &AdamWStep) {
    let g = g / update.grad_divisor;
    let t = update.step as i32;
    *p -= update.lr * update.weight_decay * *p;
    *m = update.beta1 * *m + (1.0 - update.beta1) * g;
    *v = update.beta2 * *v + (1.0 - update.beta2) * g * g;
    let m_hat = *m / (1.0 - update.beta1.powi(t));
    let v_hat = *v / (1.0 - update.beta2.powi(t));
    *p -= update.lr * m_hat / (v_hat.sqrt() + update.eps);
}

#[test]
fn adamw_is_the_algorithm() {
    let sizes = [5_usize, 1000];
    let list = |seed: u64| -> Vec<Tensor> {
        sizes.iter().map(|n| Tensor::from_slice(&spread(*n, seed + *n as u64))).collect()
    };
    let zeros = || -> Vec<Tensor> { sizes.map(|n| Tensor::zeros([n as i64], F32)).into() };
    let (mut p, mut m, mut v) = (list(10), zeros(), zeros());
    let wide =
        |list: &[Tensor]| -> Vec<f64> { list.iter().flat_map(values).map(f64::from).collect() };
    let (mut p64, mut m64, mut v64) = (wide(&p), wide(&m), wide(&v));
    for step in 1..=20 {
        let mut g = list(100 + step);
        let g64 = wide(&g);
        let grad_divisor = if step % 2 == 0 { 3.5 } else { 1.0 };
        let lr = 1e-2 / step as f64;
        let update = AdamWStep {
            step,
            lr,
            beta1: 0.9,
            beta2: 0.95,
            weight_decay: 0.1,
            eps: 1e-8,
            grad_divisor,
        };
        let mut moments = Moments { exp_avgs: &mut m, exp_avg_sqs: &mut v };
        fused_adamw(&mut p, &mut g, &mut moments, &update).unwrap();
        for i in 0..p64.len() {
            adamw_f64(&mut p64[i], g64[i], &mut m64[i], &mut v64[i], &update);
        }
    }
    for (name, found, expected) in
        [("weight", wide(&p), p64), ("mean", wide(&m), m64), ("square", wide(&v), v64)]
    {
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                (found - expected).abs() < 2e-6,
                "{name} {i}: found {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn adamw_refuses_mismatched_lists() {
    let ones = |n: i64| vec![Tensor::ones([n], F32)];
    let update = AdamWStep {
        step: 1,
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        weight_decay: 0.0,
        eps: 1e-8,
        grad_divisor: 1.0,
    };
    let (mut m, mut v) = (ones(2), ones(2));
    let mut moments = Moments { exp_avgs: &mut m, exp_avg_sqs: &mut v };
    assert!(fused_adamw(&mut ones(2), &mut [], &mut moments, &update).is_err());
    let mut half = vec![Tensor::ones([2], (Kind::BFloat16, Device::Cpu))];
    let error = fused_adamw(&mut half, &mut ones(2), &mut moments, &update).unwrap_err();
    assert!(error.to_string().starts_with("cannot run AdamW: "), "{error}");
}

#[test]
fn bytes_alias_the_tensor() {
    let mut t = Tensor::from_slice(&[1.0_f32, -2.0]);
    assert_eq!(bytes(&t).unwrap(), [1.0_f32.to_le_bytes(), (-2.0_f32).to_le_bytes()].concat());
    bytes_mut(&mut t).unwrap()[4..].copy_from_slice(&7.5_f32.to_le_bytes());
    assert_eq!(values(&t), [1.0, 7.5]);
    assert!(bytes(&Tensor::zeros([0], F32)).unwrap().is_empty());
}

#[test]
fn bytes_are_not_lent_while_others_can_write_them() {
    let mut t = Tensor::zeros([2, 3], F32);
    assert!(bytes_mut(&mut t).is_ok());
    let other = t.shallow_clone();
    assert!(bytes(&t).is_err(), "another handle");
    drop(other);
    let view = t.view([6]);
    assert!(bytes(&t).is_err(), "a view");
    assert!(bytes(&view).is_err(), "the view itself");
    drop(view);
    assert!(bytes(&t).is_ok());
    let leaf = t.set_requires_grad(true);
    drop(t);
    let graph = &leaf * &leaf;
    assert!(bytes(&leaf).is_err(), "a graph");
    drop(graph);
    assert!(bytes(&leaf).is_ok());
    assert!(bytes(&Tensor::new()).is_err(), "undefined");
    assert!(bytes(&Tensor::zeros([3, 2], F32).tr()).is_err(), "transposed");
}

#[test]
fn the_library_is_the_one_compiled_for() {
    assert!(runtime::torch_version().starts_with("2.11."), "{}", runtime::torch_version());
    runtime::set_deterministic().unwrap();
    let _ = runtime::has_amx();
}
