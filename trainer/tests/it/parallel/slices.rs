//! Computations on slices are bit-identical to those on the whole: the blocks of a norm, the update
//! of AdamW, and the content of a bucket's buffer.

use crate::ranks;
use bridge::{AdamWStep, Moments, fused_adamw};
use ckpt::layout::{Slices, block_elements, slice_of};
use tch::{Device, Kind, Tensor};
use trainer::mesh::DeviceMesh;
use trainer::parallel::exchange::{Buffer, Gathering, ReduceOrder, Scattering};
use trainer::parallel::norm::{block_count, block_sums};
use trainer::rng::Stream;

/// One, sizes that no vector divides, less than a block and just more, and several megabytes.
const SIZES: [i64; 9] = [1, 7, 16, 129, 4_000, 8_191, 65_536, 300_007, 1_100_000];

fn random(name: &str, len: i64) -> Tensor {
    let mut values = vec![0.0; len as usize];
    Stream::new(11, name).fill_normal(0, 1.0, &mut values);
    Tensor::from_slice(&values)
}

fn slices(len: i64, replicas: u64) -> Vec<(i64, i64)> {
    let of = |replica| slice_of(Slices::Blocks, len as u64, replicas, replica);
    let slices: Vec<_> = (0..replicas).map(of).collect();
    assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start), "{len} {replicas}");
    assert_eq!((slices[0].start, slices.last().expect("a replica").end), (0, len as u64));
    slices.into_iter().map(|s| (s.start as i64, (s.end - s.start) as i64)).collect()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = Vec::<f32>::try_from(tensor.reshape([-1])).expect("f32");
    values.into_iter().map(f32::to_bits).collect()
}

/// Threads divide large tensors: the bits are compared for equal numbers of threads.
fn with_threads(check: impl Fn(&str)) {
    for threads in [1, 2] {
        tch::set_num_threads(threads);
        check(&format!("{threads} threads"));
    }
    tch::set_num_threads(1);
}

#[test]
fn slices_are_even_and_start_at_blocks() {
    for len in SIZES {
        for replicas in [1, 2, 3, 4, 8, 64] {
            for (first, count) in slices(len, replicas) {
                assert!(count == 0 || first % block_elements(len as u64) as i64 == 0);
                assert!(first % 16 == 0 || count == 0);
                let even = len as f64 / replicas as f64;
                assert!((count as f64) <= even * (1.0 + replicas as f64 / 256.0) + 16.0);
            }
        }
    }
}

#[test]
fn blocks_of_a_norm() {
    with_threads(|what| {
        for len in SIZES {
            let whole = random("grad", len);
            let expected = Vec::<f64>::try_from(block_sums(&whole, len as u64).unwrap()).unwrap();
            assert_eq!(expected.len(), block_count(len as u64), "{what}: {len}");
            let norm = expected.iter().sum::<f64>().sqrt();
            let other = whole.to_kind(Kind::Double).norm().double_value(&[]);
            assert!((norm / other - 1.0).abs() < 1e-12, "{what}: {len}");
            for replicas in [2, 4, 8] {
                let mut found = vec![0.0; expected.len()];
                for (first, count) in slices(len, replicas) {
                    let block = (first as u64).div_ceil(block_elements(len as u64)) as usize;
                    let slice = whole.narrow(0, first, count);
                    let own = Vec::<f64>::try_from(block_sums(&slice, len as u64).unwrap());
                    let own = own.unwrap();
                    found[block..block + own.len()].copy_from_slice(&own);
                }
                assert!(found == expected, "{what}: {len} elements, {replicas} replicas");
            }
        }
    });
}

#[test]
fn adamw_of_slices() {
    let step = AdamWStep {
        step: 3,
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        weight_decay: 0.1,
        eps: 1e-8,
        grad_divisor: 1.7,
    };
    let update = |tensors: [Tensor; 4]| {
        let [param, grad, avg, sq] = tensors;
        let (mut params, mut grads) = ([param], [grad]);
        let (mut avgs, mut sqs) = ([avg], [sq]);
        let mut moments = Moments { exp_avgs: &mut avgs, exp_avg_sqs: &mut sqs };
        fused_adamw(&mut params, &mut grads, &mut moments, &step).unwrap();
        let [[param], [avg], [sq]] = [params, avgs, sqs];
        [param, avg, sq].map(|tensor| bits(&tensor))
    };
    with_threads(|what| {
        for len in SIZES {
            let squares = random("sq", len).square();
            let state = [random("param", len), random("grad", len), random("avg", len), squares];
            let expected = update(state.each_ref().map(Tensor::copy));
            for replicas in [2, 4, 8] {
                let mut found = [const { Vec::new() }; 3];
                for (first, count) in slices(len, replicas) {
                    let slice = |tensor: &Tensor| tensor.narrow(0, first, count).copy();
                    let part = update(state.each_ref().map(slice));
                    found.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
                }
                assert!(found == expected, "{what}: {len} elements, {replicas} replicas");
            }
        }
    });
}

#[test]
fn a_buffer_round_trips_tensors() {
    for replicas in [1, 2, 4, 8] {
        let tensors: Vec<Tensor> = SIZES.iter().map(|len| random("any", *len)).collect();
        let buffer = Buffer::new(SIZES, replicas);
        let rows = buffer.pack(&tensors).unwrap();
        assert_eq!(rows.numel() % replicas, 0);
        for (found, expected) in buffer.unpack(&rows).unwrap().iter().zip(&tensors) {
            assert_eq!(bits(found), bits(expected), "{replicas} replicas");
        }
        let rows = rows.view([replicas as i64, -1]);
        for replica in 0..replicas {
            let row = rows.get(replica as i64);
            let own = buffer.unpack_own(&row, replica).unwrap();
            for ((tensor, own), len) in tensors.iter().zip(&own).zip(SIZES) {
                let (first, count) = slices(len, replicas as u64)[replica];
                assert_eq!(bits(own), bits(&tensor.narrow(0, first, count)));
            }
            assert_eq!(bits(&buffer.pack_own(&own).unwrap()), bits(&row));
        }
    }
    // Half precision is not converted.
    let half = Tensor::ones([33], (Kind::BFloat16, Device::Cpu));
    let buffer = Buffer::new([33], 2);
    assert_eq!(buffer.pack(&[half]).unwrap().kind(), Kind::BFloat16);
}

/// GPUs exchange as one collective what CPUs send as messages.
#[test]
fn collective_exchanges_equal_messages() {
    const ROW: i64 = 1_003;
    for dp in [2, 3, 4] {
        let rows = dp as i64;
        ranks::on_ranks(DeviceMesh { dp, ..DeviceMesh::ALONE }, |comm| {
            let group = comm.dp.as_ref().expect("replicas");
            // Made twice, because rows are added in place.
            let packed = || random(&format!("rows of {}", comm.rank), rows * ROW);
            let sent = Scattering::start(group, &packed(), ReduceOrder::Tree, 0).unwrap();
            let expected = sent.finish().unwrap().own(comm.rank).unwrap();
            let at_once = Scattering::at_once(group, packed().view([rows, ROW])).unwrap();
            let found = at_once.finish().unwrap().own(comm.rank).unwrap();
            assert_eq!(bits(&found), bits(&expected), "summed by {dp}");

            let expected = Gathering::start(group, &expected, 1).unwrap().finish().unwrap();
            let empty = found.new_empty([rows, ROW], (Kind::Float, Device::Cpu));
            let all = Gathering::at_once(group, empty, &found).unwrap().finish().unwrap();
            assert_eq!(bits(&all), bits(&expected), "gathered by {dp}");
        });
    }
}
