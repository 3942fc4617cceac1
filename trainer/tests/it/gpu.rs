//! The path for GPUs, on a machine without one: the device of tensors is CUDA, and a tensor of the
//! host among them is an error (`bridge::fake_gpu`). The results are those of the CPU. Streams,
//! kernels and NCCL are not tested.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::common::Lab;
use crate::ranks::runs::{BF16, DROPPING, End, FP32, Family, How, run, run_on};
use crate::ranks::{Layout, on_devices};
use bridge::dist::{Group, GroupOptions, Reduce, Store};
use bridge::fake_gpu;
use loader::Batch;
use loader::batch::{BertBatch, T5Batch};
use tch::{Device, Kind, Tensor};
use trainer::config::Config;
use trainer::eval::{ScoredRow, judge};
use trainer::generate::{self, Sampling, Trained};
use trainer::mesh::DeviceMesh;
use trainer::{Host, Outcome};

fn gpus() {
    fake_gpu::install();
    tch::set_num_threads(1);
}

/// The largest relative difference of losses and norms, which depend on all of a step.
fn apart(one: &End, other: &End) -> f64 {
    assert_eq!(one.reports.len(), other.reports.len());
    let numbers = |end: &End| {
        let numbers = end.reports.iter().flat_map(|(loss, norm)| [*loss, *norm]);
        numbers.map(f64::from_bits).collect::<Vec<f64>>()
    };
    let pairs = numbers(one).into_iter().zip(numbers(other));
    pairs.map(|(one, other)| (one / other - 1.0).abs()).fold(0.0, f64::max)
}

/// On GPUs in each of these layouts: close to the results of the CPU, with the first's bits.
fn check<F: Family>(how: How, near: f64, layouts: &[Layout]) {
    gpus();
    let cpu = run::<F>(how, &Layout { tp: 1, sequence: false, ..Layout::ALONE });
    let expected = run_on::<F>(Device::Cuda, how, &layouts[0]);
    let far = apart(&expected, &cpu);
    assert!(far < near, "{} {how:?} {:?}: {far} apart", F::NAME, layouts[0]);
    for layout in &layouts[1..] {
        let found = run_on::<F>(Device::Cuda, how, layout);
        assert_eq!(found.reports, expected.reports, "{} {how:?} {layout:?}", F::NAME);
        assert!(found.tensors == expected.tensors, "{} {how:?} {layout:?}: other bits", F::NAME);
    }
}

const BASE: Layout = Layout::ALONE;

#[test]
fn a_tensor_of_the_host_among_those_of_a_gpu_is_refused() {
    gpus();
    let here = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
    let there = Tensor::ones([2, 3], (Kind::Float, Device::Cuda(1)));
    assert!(there.f_matmul(&here.tr()).is_err());
    assert!(there.f_add(&here).is_err());
    assert!(there.f_add(&there.to_device(Device::Cuda(2))).is_err());
    let sum = (&there + &there).sum(Kind::Float);
    assert_eq!((sum.device(), sum.double_value(&[])), (Device::Cuda(1), 12.0));
}

#[test]
fn gpt() {
    let layouts = [
        BASE,
        Layout { dp: 2, ..BASE },
        Layout { dp: 2, zero: 1, bucket_mib: 1, ..BASE },
        Layout { dp: 4, zero: 2, ..BASE },
        Layout { dp: 2, zero: 3, ..BASE },
        Layout { pp: 2, recompute: true, ..BASE },
        Layout { pp: 2, virtual_stages: 2, schedule: "interleaved", dp: 2, zero: 1, ..BASE },
    ];
    check::<Batch>(FP32, 1e-5, &layouts);
    check::<Batch>(BF16, 2e-2, &layouts[..3]);
    let keys = "norm = 'rmsnorm'\nactivation = 'swiglu'\npositions = 'rope'\nbias = false";
    check::<Batch>(How { model: keys, ..FP32 }, 1e-5, &layouts[..1]);
}

#[test]
fn t5_and_bert() {
    let layouts =
        [BASE, Layout { dp: 2, pp: 2, zero: 1, ..BASE }, Layout { dp: 2, zero: 3, ..BASE }];
    check::<T5Batch>(FP32, 1e-5, &layouts);
    check::<BertBatch>(FP32, 1e-5, &layouts);
    let keys = "positions = 'learned'\nbias = true\ntie_embeddings = true";
    check::<T5Batch>(How { model: keys, ..FP32 }, 1e-5, &layouts[..2]);
}

#[test]
fn tensor_and_sequence_parallel() {
    for sequence in [false, true] {
        let two = Layout { tp: 2, sequence, ..BASE };
        check::<Batch>(FP32, 1e-4, &[two, Layout { dp: 2, pp: 2, zero: 1, ..two }]);
        check::<T5Batch>(FP32, 1e-4, &[two]);
        check::<BertBatch>(FP32, 1e-4, &[two]);
    }
}

/// The random numbers of a GPU do not depend on earlier draws: replicas, stages and recomputed
/// layers drop the same elements.
#[test]
fn dropout_on_gpus() {
    gpus();
    let expected = run_on::<Batch>(Device::Cuda, DROPPING, &BASE);
    let layouts = [
        Layout { recompute: true, ..BASE },
        Layout { dp: 2, ..BASE },
        Layout { dp: 2, pp: 2, zero: 1, recompute: true, ..BASE },
        Layout { dp: 2, zero: 3, ..BASE },
    ];
    for layout in layouts {
        let found = run_on::<Batch>(Device::Cuda, DROPPING, &layout);
        assert_eq!(found.reports, expected.reports, "{layout:?}");
        assert!(found.tensors == expected.tensors, "{layout:?}: other bits");
    }
    // As many elements as on the CPU, but others.
    let far = apart(&expected, &run::<Batch>(DROPPING, &BASE));
    assert!(1e-4 < far && far < 0.3, "{far} apart");
    assert!(apart(&expected, &run::<Batch>(FP32, &BASE)) > 1e-4, "nothing is dropped");
    let found = run_on::<T5Batch>(Device::Cuda, DROPPING, &Layout { tp: 2, ..BASE });
    let expected = run_on::<T5Batch>(Device::Cuda, DROPPING, &BASE);
    assert!(apart(&found, &expected) < 0.3, "{}", apart(&found, &expected));
}

/// A run with weights and moments on a GPU, or offloaded to the host, and the use of its
/// checkpoint.
#[test]
fn a_run_and_its_checkpoint() {
    gpus();
    let lab = Lab::new();
    for (name, keys) in [
        ("whole", &[][..]),
        ("half", &[("precision.dtype", "'fp16'")]),
        ("beside", &[("optim.offload", "'cpu'"), ("precision.dtype", "'bf16'")]),
    ] {
        let own = [
            ("run.device", "'cuda'"),
            ("run.budget", "{ steps = 8 }"),
            ("log.peak_flop_per_s", "1e12"),
        ];
        // To the end, and with an interruption.
        let config = |run: &str| load(&lab.config(run, &[&own[..], keys].concat()));
        let stopped = format!("{name}-stopped");
        assert_eq!(train(&config(name), false), Outcome::Done);
        assert_eq!(train(&config(&stopped), true), Outcome::Saved);
        assert_eq!(train(&config(&stopped), false), Outcome::Done);
        lab.assert_same(&stopped, name);
    }
    let place = lab.path("whole").display().to_string();
    let there = Trained::open(&place, None).unwrap();
    assert_eq!(there.device(), Device::Cuda(0));
    let mut config = there.config().clone();
    config.run.device = trainer::config::ComputeOn::Cpu;
    let here = Trained::open(&place, Some(config)).unwrap();
    let rows = [ScoredRow { tokens: (5..17).collect(), counts_from: 3 }];
    for (here, there) in
        judge(&here, &rows).unwrap()[0].iter().zip(&judge(&there, &rows).unwrap()[0])
    {
        assert!((here.loss - there.loss).abs() < 1e-4, "{here:?} {there:?}");
    }
    let generate = |trained: &Trained| {
        let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
        let (tokens_min, tokens_max) = (20, 20);
        let options = generate::GenerateOptions {
            samples: 2,
            tokens_min,
            tokens_max,
            sampling,
            seed: 1,
            stop: None,
            start: 0,
        };
        let mut tokens = Vec::new();
        trained
            .write(&[7, 20, 33], &options, &mut |_, token| {
                tokens.push(token);
                Ok(())
            })
            .unwrap();
        tokens
    };
    assert_eq!(generate(&there), generate(&here));
}

fn load(path: &Path) -> Config {
    Config::load(path.to_str().unwrap(), &[]).unwrap()
}

fn train(config: &Config, stops: bool) -> Outcome {
    let stop = AtomicBool::new(stops);
    let host = Host { stop: &stop, terminal: Box::new(io::sink()), agent: None, world: None };
    trainer::train(config, host).unwrap()
}

/// While a GPU waits for another rank, a read does not return: its error names the operation.
#[test]
fn settle_reports_a_hanging_operation() {
    gpus();
    let server = Store::serve("127.0.0.1", 0, Duration::from_secs(30)).unwrap();
    bridge::runtime::use_gpu(7).unwrap();
    let options = GroupOptions::local(Duration::from_millis(300));
    let group = Group::nccl(&server, "dp[0]", 0, &[0], Device::Cuda(7), &options).unwrap();
    let mut ones = Tensor::ones([3], (Kind::Float, Device::Cuda(7)));
    group.all_reduce(&mut ones, Reduce::Sum).unwrap();
    bridge::dist::settle().unwrap();
    assert_eq!(server.waits(), []);
    fake_gpu::hang(true);
    group.all_reduce(&mut ones, Reduce::Sum).unwrap();
    let waits = server.waits();
    let settled = bridge::dist::settle();
    fake_gpu::hang(false);
    assert_eq!(waits.len(), 1, "the watchdog sees what the GPU waits for");
    assert_eq!((waits[0].op, waits[0].number), ("all_reduce", 2));
    let text = settled.unwrap_err().to_string();
    assert!(text.starts_with("cannot complete all_reduce on dp[0] (ranks 0): "), "{text}");
    assert!(text.contains("the GPU is still waiting for it"), "{text}");
    bridge::dist::settle().unwrap();
}

/// Each rank computes on its GPU; a tensor of the host is refused.
#[test]
fn devices_are_chosen() {
    gpus();
    let mesh = DeviceMesh { tp: 2, ..DeviceMesh::ALONE };
    let sums = on_devices(Device::Cuda, mesh, |comm| {
        let group = comm.tp.as_ref().unwrap();
        assert_eq!(group.device(), Device::Cuda(comm.rank));
        let mut rank = Tensor::full([1], comm.rank as i64 + 1, (Kind::Int64, group.device()));
        group.all_reduce(&mut rank, Reduce::Sum).unwrap();
        let mut of_host = Tensor::ones([1], (Kind::Float, Device::Cpu));
        assert!(group.all_reduce(&mut of_host, Reduce::Sum).is_err(), "NCCL takes no such thing");
        rank.int64_value(&[0])
    });
    assert_eq!(sums, [3, 3]);
}
