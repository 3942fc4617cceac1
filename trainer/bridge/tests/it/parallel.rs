//! Gradients through collectives, against a graph on one rank.

use crate::common::ranks;
use bridge::autograd::{copy_in, gather_rows, reduce_out, scatter_rows};
use bridge::{backward, take_grad};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 8;
const HIDDEN: i64 = 6;
const FFN: i64 = 12;

/// Numbers that are spread out and the same on every rank.
fn spread(shape: &[i64], seed: i64) -> Tensor {
    let len = shape.iter().product::<i64>();
    let i = Tensor::arange(len, (Kind::Double, Device::Cpu)) + seed * 1000;
    ((i * 12.9898).sin() * 43758.5453).sin().reshape(shape)
}

struct Given {
    x: Tensor,
    up: Tensor,
    down: Tensor,
    /// The gradient of the result.
    seed: Tensor,
}

fn given() -> Given {
    Given {
        x: spread(&[ROWS, HIDDEN], 1),
        up: spread(&[HIDDEN, FFN], 2),
        down: spread(&[FFN, HIDDEN], 3),
        seed: spread(&[ROWS, HIDDEN], 4),
    }
}

fn leaf(tensor: &Tensor) -> Tensor {
    tensor.copy().set_requires_grad(true)
}

/// A residual block on one rank: its result, and the gradients of x, up and down.
fn dense() -> [Tensor; 4] {
    let Given { x, up, down, seed } = given();
    let (x, up, down) = (leaf(&x), leaf(&up), leaf(&down));
    let y = &x + x.matmul(&up).gelu("none").matmul(&down);
    let result = y.detach();
    backward(&[y], &[seed]).unwrap();
    [result, grad(&x), grad(&up), grad(&down)]
}

fn grad(leaf: &Tensor) -> Tensor {
    take_grad(leaf).unwrap().expect("it was used")
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let worst = (found - expected).abs().max().double_value(&[]);
    assert!(worst < 1e-12, "{what}: off by {worst}");
}

/// Rank `rank`'s part of a dimension.
fn part(tensor: &Tensor, dim: i64, rank: usize, size: usize) -> Tensor {
    tensor.chunk(size as i64, dim).swap_remove(rank).contiguous()
}

#[test]
fn a_block_of_split_columns_and_rows_is_the_dense_one() {
    for size in [2, 4] {
        ranks(size, |group| {
            let expected = dense();
            let Given { x, up, down, seed } = given();
            let rank = group.rank();
            let x = leaf(&x);
            let up = leaf(&part(&up, 1, rank, size));
            let down = leaf(&part(&down, 0, rank, size));
            let inside = copy_in(group, &x).unwrap().matmul(&up).gelu("none").matmul(&down);
            let y = &x + reduce_out(group, &inside).unwrap();
            assert_close("y", &y.detach(), &expected[0]);
            backward(&[y], &[seed]).unwrap();
            assert_close("x", &grad(&x), &expected[1]);
            assert_close("up", &grad(&up), &part(&expected[2], 1, rank, size));
            assert_close("down", &grad(&down), &part(&expected[3], 0, rank, size));
        });
    }
}

#[test]
fn rows_split_outside_a_block_give_the_same_gradients() {
    for size in [2, 4] {
        ranks(size, |group| {
            let expected = dense();
            let Given { x, up, down, seed } = given();
            let rank = group.rank();
            let x = leaf(&part(&x, 0, rank, size));
            let up = leaf(&part(&up, 1, rank, size));
            let down = leaf(&part(&down, 0, rank, size));
            let inside = gather_rows(group, &x).unwrap().matmul(&up).gelu("none").matmul(&down);
            let y = &x + scatter_rows(group, &inside).unwrap();
            assert_close("y", &y.detach(), &part(&expected[0], 0, rank, size));
            backward(&[y], &[part(&seed, 0, rank, size)]).unwrap();
            assert_close("x", &grad(&x), &part(&expected[1], 0, rank, size));
            assert_close("up", &grad(&up), &part(&expected[2], 1, rank, size));
            assert_close("down", &grad(&down), &part(&expected[3], 0, rank, size));
        });
    }
}

/// A gradient that other parts of the graph use too must not be summed in place.
#[test]
fn a_shared_gradient_is_not_modified() {
    ranks(2, |group| {
        let x = leaf(&spread(&[4], 1));
        let other = leaf(&spread(&[4], 2));
        let y = copy_in(group, &x).unwrap() + &other;
        let seed = spread(&[4], 3);
        backward(&[y], &[seed.shallow_clone()]).unwrap();
        assert_close("x", &grad(&x), &(&seed * 2));
        assert_close("other", &grad(&other), &spread(&[4], 3));
    });
}

#[test]
fn graphs_that_are_dropped_leave_the_group_usable() {
    ranks(2, |group| {
        for round in 0..100 {
            let x = leaf(&spread(&[4, 2], round));
            let y = reduce_out(group, &copy_in(group, &x).unwrap()).unwrap();
            if round % 3 > 0 {
                backward(&[y], &[spread(&[4, 2], 7)]).unwrap();
                assert_close("x", &grad(&x), &(spread(&[4, 2], 7) * 2));
            }
        }
    });
}
