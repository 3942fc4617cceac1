//! Training in any layout is bit-identical to training on one rank: weights, moments, loss, norm.
//!
//! Ranks are threads of this process, connected by Gloo over loopback. `FEEDLINE_STEPS=50
//! FEEDLINE_GRID=full` runs longer, and in every layout.

#![expect(clippy::print_stdout, reason = "the long run prints its progress")]

use crate::ranks;
use crate::ranks::runs::{
    BF16, DROPPING, DROPPING_BF16, End, FP16, FP32, Family, How, MICRO_BATCHES, config, run, steps,
};
use crate::ranks::{Layout, on_ranks};
use loader::Batch;
use loader::batch::{BertBatch, T5Batch};
use trainer::mesh::DeviceMesh;
use trainer::{StepReport, Trainer};

fn is_full() -> bool {
    std::env::var("FEEDLINE_GRID").is_ok_and(|grid| grid == "full")
}

fn check<F: Family>(how: How, layouts: &[Layout]) {
    tch::set_num_threads(1);
    bridge::runtime::set_deterministic().expect("libtorch can");
    let expected = run::<F>(how, &Layout::ALONE);
    for layout in layouts {
        let found = run::<F>(how, layout);
        assert_eq!(found.tensors.len(), expected.tensors.len(), "{layout:?}");
        assert_eq!(found.reports, expected.reports, "{how:?} {layout:?}: losses and norms");
        for (at, values) in &found.tensors {
            let differ = values.iter().zip(&expected.tensors[at]).filter(|(a, b)| a != b).count();
            assert_eq!(differ, 0, "{how:?} {layout:?}: elements of tensor {at} with other bits");
        }
        println!("{} {how:?} {layout:?}: {} steps, the same bits", F::NAME, steps());
    }
}

/// Every pair of factors in some layout, and the largest layouts.
fn covering(chunks: u64) -> Vec<Layout> {
    let base = Layout::ALONE;
    let mut layouts = vec![
        Layout { dp: 2, ..base },
        Layout { dp: 4, bucket_mib: 1, ..base },
        Layout { pp: 2, recompute: true, ..base },
        Layout { pp: 4, dp: 2, zero: 1, ..base },
        Layout { pp: 2, dp: 2, schedule: "gpipe", ..base },
        Layout { pp: 2, stages: &[1, 7], ..base },
        Layout { dp: 4, zero: 1, ..base },
        Layout { dp: 2, zero: 2, ..base },
        Layout { dp: 4, zero: 3, ..base },
    ];
    if chunks > 1 {
        let schedule = "interleaved";
        layouts.push(Layout { pp: 2, virtual_stages: 2, schedule, dp: 2, zero: 1, ..base });
        layouts.push(Layout { pp: 4, virtual_stages: 2, schedule, ..base });
    }
    layouts
}

/// All layouts.
fn full(chunks: u64) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for dp in [1, 2, 4] {
        for zero in if dp == 1 { 0..1 } else { 0..4 } {
            for pp in if zero > 1 { &[1][..] } else { &[1, 2, 4] } {
                for virtual_stages in if *pp > 1 { 1..=chunks } else { 1..=1 } {
                    let schedule = if virtual_stages > 1 { "interleaved" } else { "1f1b" };
                    let (pp, base) = (*pp, Layout::ALONE);
                    // Eight layers are at most eight stages, and interleaved ranks divide the
                    // micro-batches of a replica.
                    let fits = (MICRO_BATCHES / dp).is_multiple_of(pp) || virtual_stages == 1;
                    if fits && virtual_stages != 3 && pp as u64 * virtual_stages <= 8 {
                        layouts.push(Layout { dp, zero, pp, virtual_stages, schedule, ..base });
                    }
                }
            }
        }
    }
    layouts
}

fn layouts(chunks: u64) -> Vec<Layout> {
    if is_full() { full(chunks) } else { covering(chunks) }
}

#[test]
fn gpt_in_fp32() {
    check::<Batch>(FP32, &layouts(4));
}

#[test]
fn gpt_in_bf16() {
    check::<Batch>(BF16, &layouts(4));
}

#[test]
fn t5_in_fp32() {
    check::<T5Batch>(FP32, &layouts(1));
}

#[test]
fn t5_in_bf16() {
    check::<T5Batch>(BF16, &layouts(1));
}

/// Both ends of the encoder and of the decoder use one table of positions, and a third the words.
#[test]
fn t5_with_learned_positions() {
    let how = How { model: "positions = 'learned'\nbias = true\ntie_embeddings = true", ..FP32 };
    let base = Layout::ALONE;
    check::<T5Batch>(
        how,
        &[Layout { pp: 4, dp: 2, zero: 1, ..base }, Layout { dp: 4, zero: 3, ..base }],
    );
}

/// Whichever rank computes a layer, and however often, it drops the same elements.
#[test]
fn dropout_is_the_same_in_every_layout() {
    let base = Layout::ALONE;
    let layouts = [
        Layout { dp: 4, ..base },
        Layout { recompute: true, ..base },
        Layout { dp: 2, pp: 2, recompute: true, ..base },
        Layout { pp: 4, dp: 2, zero: 1, ..base },
        Layout { dp: 4, zero: 3, ..base },
    ];
    let schedule = "interleaved";
    let chunks = Layout { pp: 2, virtual_stages: 2, schedule, dp: 2, zero: 1, ..base };
    check::<Batch>(DROPPING, &[&layouts[..], &[chunks]].concat());
    check::<T5Batch>(DROPPING, &layouts[1..]);
    check::<BertBatch>(DROPPING, &layouts[2..]);
    check::<Batch>(DROPPING_BF16, &layouts[2..4]);
    let [some, none] = [DROPPING, FP32].map(|how| run::<Batch>(how, &base));
    assert!(some.reports != none.reports, "nothing is dropped");
}

/// Inputs of layers that are spilled to a disk are read back unchanged, in every order of passes;
/// the encoder output that all layers of a decoder share stays in memory.
#[test]
fn spilled_layer_inputs_change_no_bit() {
    let base = Layout { recompute: true, spills: true, ..Layout::ALONE };
    let layouts = [
        // All inputs of a step are spilled at once, which are more than the buffers hold.
        Layout { schedule: "gpipe", ..base },
        Layout { dp: 2, pp: 2, zero: 1, ..base },
        Layout { pp: 2, schedule: "gpipe", ..base },
        Layout { dp: 2, zero: 3, recompute: false, ..base },
    ];
    let woven = Layout { pp: 2, virtual_stages: 2, schedule: "interleaved", ..base };
    check::<Batch>(FP32, &[&layouts[..], &[woven]].concat());
    check::<Batch>(BF16, &layouts[..2]);
    check::<T5Batch>(FP32, &layouts);
    check::<T5Batch>(BF16, &layouts[..2]);
    check::<BertBatch>(FP32, &layouts[1..2]);
    check::<T5Batch>(DROPPING, &layouts[..1]);
}

/// The sums of a ring depend on the number of its ranks, but not by much.
#[test]
fn ring_reduction_is_close() {
    let expected = run::<Batch>(FP32, &Layout::ALONE);
    let found = run::<Batch>(FP32, &Layout { dp: 4, reduce: "ring", ..Layout::ALONE });
    for ((found, _), (expected, _)) in found.reports.iter().zip(&expected.reports) {
        let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
        assert!((found / expected - 1.0).abs() < 1e-5, "found {found}, expected {expected}");
    }
    // The order of additions matters here; otherwise the tests above would prove nothing.
    assert!(found.tensors != expected.tensors, "the same bits in another order");
}

/// Gradients that replicas send in 16 bits are rounded, but summed in f32, and equal on all.
#[test]
fn gradients_sent_in_16_bits_are_close() {
    let expected = run::<Batch>(FP32, &Layout::ALONE);
    let how = How { reduce: "bf16", ..FP32 };
    let alone = run::<Batch>(how, &Layout::ALONE);
    assert!(alone == expected, "nothing is sent");
    let base = Layout { dp: 2, ..Layout::ALONE };
    let whole = run::<Batch>(how, &base);
    assert!(whole.tensors != expected.tensors, "the same bits, though rounded");
    for layout in [
        base,
        Layout { zero: 1, ..base },
        Layout { zero: 2, ..base },
        Layout { dp: 4, zero: 3, ..base },
        Layout { reduce: "ring", ..base },
        Layout { pp: 2, ..base },
    ] {
        let found = run::<Batch>(how, &layout);
        for ((found, norm), (expected, expected_norm)) in
            found.reports.iter().zip(&expected.reports)
        {
            for (found, expected) in [(found, expected), (norm, expected_norm)] {
                let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
                assert!(
                    (found / expected - 1.0).abs() < 5e-3,
                    "{layout:?}: found {found}, expected {expected}"
                );
            }
        }
        // The sent bits depend on the replicas, not on the stages.
        assert!(layout.pp == 1 || found == whole, "{layout:?}: other bits than {base:?}");
    }
}

/// Tensor parallel ranks divide sums within a product, so their results are close; layouts with the
/// same number of them have the same bits.
fn check_tensor_parallel<F: Family>(how: How, base: Layout, others: &[Layout]) {
    tch::set_num_threads(1);
    let alone = run::<F>(how, &Layout::ALONE);
    let expected = run::<F>(how, &base);
    let numbers = |end: &End| end.reports.iter().flat_map(|(a, b)| [*a, *b]).collect::<Vec<_>>();
    // The norm as well: parameters that ranks share are counted once, and so are replicated ones.
    for (found, expected) in numbers(&expected).into_iter().zip(numbers(&alone)) {
        let (found, expected) = (f64::from_bits(found), f64::from_bits(expected));
        assert!(
            (found / expected - 1.0).abs() < 1e-4,
            "{base:?}: found {found}, expected {expected}"
        );
    }
    for layout in others {
        let found = run::<F>(how, layout);
        assert!(found.tensors == expected.tensors, "{layout:?}: other bits than {base:?}");
        assert_eq!(found.reports, expected.reports, "{layout:?}");
    }
}

#[test]
fn tensor_parallel() {
    let two = Layout { tp: 2, ..Layout::ALONE };
    let others = [
        Layout { dp: 2, pp: 2, zero: 1, ..two },
        Layout { pp: 2, virtual_stages: 2, schedule: "interleaved", ..two },
    ];
    check_tensor_parallel::<Batch>(FP32, two, &others);
    check_tensor_parallel::<T5Batch>(FP32, two, &others[..1]);
    check_tensor_parallel::<T5Batch>(DROPPING, two, &others[..1]);
}

#[test]
fn sequence_parallel() {
    let two = Layout { tp: 2, sequence: true, ..Layout::ALONE };
    check_tensor_parallel::<Batch>(FP32, two, &[Layout { dp: 2, pp: 2, zero: 1, ..two }]);
    let spilled = Layout { pp: 2, recompute: true, spills: true, ..two };
    check_tensor_parallel::<T5Batch>(FP32, two, &[spilled]);
    check_tensor_parallel::<Batch>(DROPPING, two, &[]);
    check_tensor_parallel::<T5Batch>(DROPPING, two, &[Layout { pp: 2, recompute: true, ..two }]);
}

/// A micro-batch of one replica overflows fp16: no rank updates, the scale falls at the second such
/// step, and grows again after a window of good ones.
#[test]
fn an_overflow_on_one_rank_is_skipped_by_all() {
    let layout = Layout { dp: 2, pp: 2, zero: 1, ..Layout::ALONE };
    let scale = "loss_scale = { init = 1024, window = 2, hysteresis = 2, min = 1 }";
    let config = config("gpt", FP16, &layout, scale);
    let mesh = layout.mesh();
    let ends = on_ranks(mesh, |comm| {
        let replica = comm.place().dp;
        let mut trainer = Trainer::on_mesh(&config, comm).unwrap();
        let share = mesh.share(config.share(mesh.dp), replica, MICRO_BATCHES);
        let mut step = |number: u64, poison: bool| {
            let mut batches: Vec<Batch> =
                share.iter().map(|micro| Batch::batch(number, *micro)).collect();
            if poison && replica == 1 {
                // Their sum is 0; each alone overflows fp16.
                (batches[1].loss_mask[3], batches[1].loss_mask[4]) = (1e30, -1e30);
            }
            let before = bits(&trainer);
            let report = trainer.step(&config.optim, &batches, number + 1, 0.01).unwrap();
            (report, before == bits(&trainer), trainer.scaler().unwrap())
        };
        let poisons = [false, true, true, false, false];
        poisons.into_iter().zip(0..).map(|(poison, at)| step(at, poison)).collect::<Vec<_>>()
    });
    for rank in &ends {
        let skipped: Vec<bool> = rank.iter().map(|(report, ..)| report.skipped).collect();
        assert_eq!(skipped, [false, true, true, false, false]);
        let unchanged: Vec<bool> = rank.iter().map(|(_, same, _)| *same).collect();
        assert_eq!(unchanged, skipped);
        let scales: Vec<f64> = rank.iter().map(|(.., scaler)| scaler.scale).collect();
        assert_eq!(scales, [1024.0, 1024.0, 512.0, 512.0, 1024.0]);
        let last = rank.last().unwrap().2;
        assert_eq!((last.skipped_steps, last.skipped_samples), (2, 32));
        let finite = |(report, ..): &(StepReport, bool, _)| report.loss.is_finite();
        assert!(rank.iter().filter(|one| !one.0.skipped).all(finite));
    }
}

fn bits(trainer: &Trainer) -> Vec<Vec<u32>> {
    trainer.state().into_iter().flatten().map(ranks::bits).collect()
}

/// A loss that is not finite stops every rank, with the samples of the whole step.
#[test]
fn a_non_finite_loss_stops_all_ranks() {
    let layout = Layout { dp: 2, pp: 2, ..Layout::ALONE };
    let config = config("gpt", FP32, &layout, "");
    let mesh = layout.mesh();
    let errors = on_ranks(mesh, |comm| {
        let replica = comm.place().dp;
        let mut trainer = Trainer::on_mesh(&config, comm).unwrap();
        let share = mesh.share(config.share(mesh.dp), replica, MICRO_BATCHES);
        let mut batches: Vec<Batch> = share.iter().map(|micro| Batch::batch(5, *micro)).collect();
        if replica == 0 {
            batches[2].loss_mask[0] = f32::NAN;
        }
        trainer.step(&config.optim, &batches, 6, 0.01).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.starts_with("cannot complete step 6: the loss (NaN) is not finite"),
            "{error}"
        );
        assert!(error.contains("samples 80 to 95 of"), "{error}");
    }
}

#[test]
fn a_mesh_that_differs_from_the_config_is_refused() {
    let config = config("gpt", FP32, &Layout { pp: 2, ..Layout::ALONE }, "");
    let error = Trainer::new(&config).unwrap_err().to_string();
    assert!(error.contains("pp 2"), "{error}");
    assert_eq!(DeviceMesh::ALONE.ranks(), 1);
}
