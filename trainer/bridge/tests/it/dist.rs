//! Every operation of a group against arithmetic, with ranks as threads.

use std::time::Duration;

use crate::common::{PATIENCE, ranks, stores};
use bridge::dist::{Group, GroupOptions, Listen, Reduce, Store, ranks_text};
use bridge::{Error, norms, runtime};
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Int64];

/// `len` numbers of a rank, small enough that their sums are exact in bf16 too.
fn numbers(rank: usize, len: i64, kind: Kind) -> Tensor {
    let of = |i: i64| (rank as i64 + 1) * (i % 5 + 1) % 13;
    Tensor::from_slice(&(0..len).map(of).collect::<Vec<i64>>()).to_kind(kind)
}

fn values(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64)).unwrap()
}

/// What all ranks hold, by rank.
fn all(size: usize, len: i64) -> Vec<Vec<i64>> {
    (0..size).map(|rank| values(&numbers(rank, len, Kind::Int64))).collect()
}

fn reduced(all: &[Vec<i64>], how: impl Fn(i64, i64) -> i64) -> Vec<i64> {
    (0..all[0].len()).map(|i| all.iter().map(|of| of[i]).reduce(&how).unwrap()).collect()
}

/// One operation on 2 and 4 ranks in every kind: `run` must return what `expected` does.
fn check(
    len: i64,
    run: impl Fn(&Group, Tensor) -> Tensor + Sync,
    expected: impl Fn(usize, &[Vec<i64>]) -> Vec<i64>,
) {
    for size in [2, 4] {
        let found = ranks(size, |group| {
            KINDS.map(|kind| values(&run(group, numbers(group.rank(), len, kind))))
        });
        let all = all(size, len);
        for (rank, kinds) in found.iter().enumerate() {
            for (kind, found) in KINDS.iter().zip(kinds) {
                assert_eq!(found, &expected(rank, &all), "rank {rank} of {size}, {kind:?}");
            }
        }
    }
}

/// Groups of several threads start at the same moment, several times: libtorch's flight recorder of
/// the process would be corrupted if it were on.
#[test]
fn groups_start_concurrently() {
    for _ in 0..4 {
        let found = ranks(4, |group| {
            let mut sum = numbers(group.rank(), 3, Kind::Int64);
            group.all_reduce(&mut sum, Reduce::Sum).unwrap();
            values(&sum)
        });
        let expected = reduced(&all(4, 3), |a, b| a + b);
        assert!(found.iter().all(|found| *found == expected), "{found:?}");
    }
}

type Plain = fn(i64, i64) -> i64;

#[test]
fn all_reduce_reduces_on_all() {
    let cases: [(Reduce, Plain); 3] =
        [(Reduce::Sum, |a, b| a + b), (Reduce::Max, i64::max), (Reduce::Min, i64::min)];
    for (how, plain) in cases {
        let run = |group: &Group, mut mine: Tensor| {
            group.all_reduce(&mut mine, how).unwrap();
            mine
        };
        check(37, run, |_, all| reduced(all, plain));
    }
}

#[test]
fn broadcast_and_reduce_use_their_root() {
    let broadcast = |group: &Group, mut mine: Tensor| {
        group.broadcast(&mut mine, 1).unwrap();
        mine
    };
    check(5, broadcast, |_, all| all[1].clone());
    let reduce = |group: &Group, mut mine: Tensor| {
        group.reduce(&mut mine, 1, Reduce::Sum).unwrap();
        if group.rank() == 1 { mine } else { Tensor::zeros_like(&mine) }
    };
    check(5, reduce, |rank, all| if rank == 1 { reduced(all, |a, b| a + b) } else { vec![0; 5] });
}

#[test]
fn gathers_keep_the_order_of_ranks() {
    let all_gather = |group: &Group, mine: Tensor| {
        let mut out = mine.new_zeros([7 * group.size() as i64], (mine.kind(), Device::Cpu));
        group.all_gather(&mut out, &mine).unwrap();
        out
    };
    check(7, all_gather, |_, all| all.concat());
    let gather = |group: &Group, mine: Tensor| {
        let mut out = mine.new_zeros([3 * group.size() as i64], (mine.kind(), Device::Cpu));
        group.gather((group.rank() == 0).then_some(&mut out), &mine, 0).unwrap();
        out
    };
    check(3, gather, |rank, all| if rank == 0 { all.concat() } else { vec![0; 3 * all.len()] });
}

#[test]
fn scatters_give_each_rank_its_part() {
    let part = |group: &Group, mine: &Tensor| {
        mine.new_zeros([8 / group.size() as i64], (mine.kind(), Device::Cpu))
    };
    let own = |rank: usize, of: &[i64], size: usize| {
        let len = of.len() / size;
        of[rank * len..(rank + 1) * len].to_vec()
    };
    let reduce_scatter = |group: &Group, mine: Tensor| {
        let mut out = part(group, &mine);
        group.reduce_scatter(&mut out, &mine, Reduce::Sum).unwrap();
        out
    };
    check(8, reduce_scatter, |rank, all| own(rank, &reduced(all, |a, b| a + b), all.len()));
    let scatter = |group: &Group, mine: Tensor| {
        let mut out = part(group, &mine);
        group.scatter(&mut out, (group.rank() == 1).then_some(&mine), 1).unwrap();
        out
    };
    check(8, scatter, |rank, all| own(rank, &all[1], all.len()));
    let all_to_all = |group: &Group, mine: Tensor| {
        let mut out = mine.zeros_like();
        group.all_to_all(&mut out, &mine).unwrap();
        out
    };
    check(8, all_to_all, |rank, all| all.iter().flat_map(|of| own(rank, of, all.len())).collect());
}

#[test]
fn messages_around_a_ring_match_by_tag() {
    let round = |group: &Group, mine: Tensor| {
        let (next, before) = ((group.rank() + 1) % group.size(), group.rank() + group.size() - 1);
        let (mut low, mut high) = (mine.zeros_like(), mine.zeros_like());
        // Posted in the other order than sent: the tags distinguish them.
        let second = group.recv(&mut high, before % group.size(), 8).unwrap();
        let first = group.recv(&mut low, before % group.size(), 7).unwrap();
        let sent =
            [group.send(&mine, next, 7).unwrap(), group.send(&(&mine * 3), next, 8).unwrap()];
        first.wait().unwrap();
        second.wait().unwrap();
        sent.into_iter().for_each(|sent| sent.wait().unwrap());
        high - low
    };
    check(6, round, |rank, all| {
        all[(rank + all.len() - 1) % all.len()].iter().map(|x| 2 * x).collect()
    });
}

#[test]
fn work_can_be_polled_and_dropped() {
    let found = ranks(2, |group| {
        let mut tensors: Vec<Tensor> = (0..20).map(|i| numbers(i, 1000, Kind::Float)).collect();
        let started: Vec<_> =
            tensors.iter_mut().map(|t| group.all_reduce_start(t, Reduce::Sum).unwrap()).collect();
        for (i, work) in started.into_iter().enumerate() {
            match i % 3 {
                0 => work.wait().unwrap(),
                1 => {
                    while !work.is_done() {
                        std::thread::yield_now();
                    }
                }
                _ => drop(work),
            }
        }
        tensors.iter().map(values).collect::<Vec<_>>()
    });
    for (i, tensor) in found.concat().iter().enumerate() {
        let expected = values(&(numbers(i % 20, 1000, Kind::Float) * 2));
        assert_eq!(tensor, &expected, "tensor {i}");
    }
}

/// A mesh: each rank is in a group of its row and in one of its column, and uses both at once.
#[test]
fn groups_of_one_store_do_not_mix() {
    let sums = stores(4, |rank, store| {
        let options = GroupOptions::local(PATIENCE);
        let (row, column) = (rank / 2, rank % 2);
        let name = |kind: &str, i: usize| format!("{kind}[{i}]");
        let rows = [row * 2, row * 2 + 1];
        let columns = [column, column + 2];
        let row_group = Group::gloo(&store, &name("tp", row), column, &rows, &options).unwrap();
        let column_group =
            Group::gloo(&store, &name("dp", column), row, &columns, &options).unwrap();
        assert_eq!((row_group.members(), column_group.size()), (&rows[..], 2));
        let mut a = Tensor::from_slice(&[rank as i64]);
        let mut b = Tensor::from_slice(&[rank as i64]);
        let first = row_group.all_reduce_start(&mut a, Reduce::Sum).unwrap();
        let second = column_group.all_reduce_start(&mut b, Reduce::Sum).unwrap();
        second.wait().unwrap();
        first.wait().unwrap();
        row_group.monitored_barrier("the end", PATIENCE).unwrap();
        column_group.barrier().unwrap();
        (a.int64_value(&[0]), b.int64_value(&[0]))
    });
    assert_eq!(sums, [(1, 2), (1, 4), (5, 2), (5, 4)]);
}

#[test]
fn one_rank_forms_a_group() {
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    let group = Group::gloo(&store, "dp[0]", 0, &[5], &GroupOptions::local(PATIENCE)).unwrap();
    let mut tensor = Tensor::from_slice(&[3_i64, 4]);
    group.all_reduce(&mut tensor, Reduce::Sum).unwrap();
    group.monitored_barrier("alone", PATIENCE).unwrap();
    assert_eq!(values(&tensor), [3, 4]);
}

#[test]
fn an_unknown_interface_is_an_error() {
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    for name in ["absent0", "lo\0"] {
        let options =
            GroupOptions { timeout: PATIENCE, listen: Listen::Interface(name.to_owned()) };
        assert!(Group::gloo(&store, "dp[0]", 0, &[0], &options).is_err(), "{name:?}");
    }
}

/// Addresses on which this process listens for TCP, as `/proc` has them: hexadecimal, and the port.
fn listening() -> Vec<String> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let own: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let mut addresses = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A is LISTEN; the tenth field is the inode.
            if fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9])) {
                addresses.push(fields[1].to_owned());
            }
        }
    }
    addresses
}

/// The store and the groups listen on the given address, and on no other.
#[test]
fn sockets_listen_on_loopback_only() {
    let all_local = ranks(2, |group| {
        let mut tensor = Tensor::from_slice(&[1_i64]);
        group.all_reduce(&mut tensor, Reduce::Sum).unwrap();
        let open = listening();
        group.barrier().unwrap();
        assert!(open.len() > 1, "{open:?}");
        open.iter().all(|address| address.starts_with("0100007F:"))
    });
    assert_eq!(all_local, [true, true]);
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    assert_eq!(store.listens_on().unwrap().to_string(), format!("127.0.0.1:{}", store.port()));
    // An address for documentation, which no machine has.
    let store = Store::serve("192.0.2.1", 0, Duration::from_secs(1));
    let text = store.unwrap_err().to_string();
    assert!(text.starts_with("cannot serve a store on 192.0.2.1:0: "), "{text}");
}

#[test]
fn a_store_keeps_small_values() {
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    let again = store.again().unwrap();
    assert_eq!(store.look("a").unwrap(), None);
    store.set("a", b"x\0y").unwrap();
    store.below("b").set("a", b"").unwrap();
    assert_eq!(again.get("a", PATIENCE).unwrap(), b"x\0y");
    assert_eq!(again.look("b/a").unwrap().unwrap(), b"");
    assert_eq!((store.add("n", 3).unwrap(), again.add("n", 4).unwrap()), (3, 7));
    assert!(store.has(&["a", "b/a"]).unwrap());
    assert!(!store.has(&["a", "c"]).unwrap());
    let soon = Duration::from_millis(50);
    assert!(!store.wait(&["c"], soon).unwrap());
    let error = store.get("c", soon).unwrap_err();
    assert!(error.to_string().contains("cannot get 'c' in the store on 127.0.0.1:"), "{error}");
}

#[test]
fn invalid_tensors_are_not_peer_errors() {
    let errors = ranks(2, |group| {
        let mut sparse = Tensor::zeros([3], (Kind::Float, Device::Cpu)).to_sparse_sparse_dim(1);
        let fault = group.broadcast(&mut sparse, 9).unwrap_err();
        assert!(!fault.is_peer_lost(), "{fault}");
        let three = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
        bridge::autograd::scatter_rows(group, &three).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::Torch { .. }), "{error}");
        let expected = "cannot scatter rows: expected a multiple of 2 rows, found 3";
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn ranks_text_joins_consecutive_ranks() {
    for (ranks, expected) in [
        (vec![12, 28], "12,28"),
        (vec![0, 1, 2, 3, 7], "0-3,7"),
        (vec![4], "4"),
        (vec![4, 5], "4,5"),
        (vec![], ""),
        ((0..40).map(|i| 2 * i).collect(), "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,..."),
    ] {
        assert_eq!(ranks_text(&ranks), expected);
    }
}

#[test]
fn norms_are_summed_in_f64() {
    let big = Tensor::full([1 << 16], 3.0, (Kind::Float, Device::Cpu));
    let small = Tensor::from_slice(&[3.0_f32, 4.0]);
    let found = Vec::<f64>::try_from(norms(&[big, small]).unwrap()).unwrap();
    assert_eq!(found, [3.0 * 256.0, 5.0]);
    assert!(norms::<Tensor>(&[]).is_err());
}

#[test]
fn random_state_is_restored() {
    let state = runtime::rng_state(Device::Cpu).unwrap();
    let draw = || Vec::<f32>::try_from(Tensor::randn([9], (Kind::Float, Device::Cpu))).unwrap();
    let first = draw();
    assert_ne!(draw(), first);
    runtime::set_rng_state(Device::Cpu, &state).unwrap();
    assert_eq!(draw(), first);
    assert!(runtime::set_rng_state(Device::Cpu, &[1, 2, 3]).is_err());
}
