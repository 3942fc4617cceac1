//! The rank of a process, from the variables of its launcher.

use std::collections::HashMap;

use recipe::Incompatible;
use recipe::world::{StoreHost, World, expand};

#[test]
fn host_lists_expand_as_by_scontrol() {
    // As printed by `scontrol show hostnames`.
    for (list, expected) in [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("login,node[08-11]", "login node08 node09 node10 node11"),
        ("gpu-a[001-002]-ib,x", "gpu-a001-ib gpu-a002-ib x"),
        ("r[1-2]n[3-4]", "r1n3 r1n4 r2n3 r2n4"),
        ("a[5],b[6-6,8]", "a5 b6 b8"),
    ] {
        assert_eq!(expand(list).unwrap().join(" "), expected, "{list}");
    }
    for (list, expected) in [
        ("", "empty host name"),
        ("a,,b", "empty host name"),
        ("n[1-3", "unclosed bracket"),
        ("n1-3]", "unopened bracket"),
        ("n[3-1]", "reversed"),
        ("n[a-b]", "expected a range of numbers"),
        ("n[1-+3]", "expected a range of numbers"),
        ("n[]", "expected a range of numbers"),
        ("n[0-99999999]", "too long"),
        ("n[0-999]x[0-999]", "more than 65536 hosts"),
        ("n[18446744073709551615-18446744073709551616]", "expected a range of numbers"),
    ] {
        let text = expand(list).unwrap_err().to_string();
        assert!(text.contains(expected), "{list}: {text}");
    }
}

fn find(variables: &[(&str, &str)]) -> Result<Option<World>, Incompatible> {
    let map: HashMap<&str, &str> = variables.iter().copied().collect();
    World::find(|name| map.get(name).map(|value| (*value).to_owned()))
}

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "a.example"),
    ("MASTER_PORT", "29500"),
];

const SRUN: [(&str, &str); 7] = [
    ("SLURM_JOB_ID", "70012"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_STEP_NODELIST", "n[07-09]"),
    ("SLURM_STEP_NUM_NODES", "3"),
    ("SLURM_NTASKS", "12"),
    ("SLURM_PROCID", "5"),
    ("SLURM_LOCALID", "1"),
];

#[test]
fn ranks_are_read_from_the_launcher() {
    assert_eq!(find(&[]).unwrap(), None);
    let world = find(&TORCHRUN).unwrap().unwrap();
    assert_eq!(world.to_string(), "rank 3 of 4, store on a.example:29500");
    assert_eq!((world.local_rank, world.keeper, world.restart), (1, StoreHost::FirstRank, 0));

    // The agent of torchrun hosts the store, and gives the number of restarts.
    let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")];
    let world = find(&[&TORCHRUN[..], &agent].concat()).unwrap().unwrap();
    assert_eq!((world.keeper, world.restart), (StoreHost::Launcher, 2));

    let world = find(&SRUN).unwrap().unwrap();
    assert_eq!(world.to_string(), "rank 5 of 12, store on n07:15194");
    let over = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "7000")];
    let world = find(&[&SRUN[..], &over].concat()).unwrap().unwrap();
    assert_eq!(world.to_string(), "rank 5 of 12, store on 10.0.0.1:7000");
    let one_node = [&SRUN[..], &[("SLURM_STEP_NUM_NODES", "1")]].concat();
    assert_eq!(find(&one_node).unwrap().unwrap().host, "127.0.0.1");
    // torchrun inside of an srun.
    assert_eq!(find(&[&SRUN[..], &TORCHRUN].concat()).unwrap().unwrap().rank, 3);
    // A batch script has a job with tasks, but is not a task.
    let batch = [("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "12")];
    assert_eq!(find(&batch).unwrap(), None);
    let first = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
    assert_eq!(find(&[&SRUN[..], &first].concat()).unwrap(), None);
}

#[test]
fn contradicting_variables_are_named() {
    let with = |name: &'static str, value: &'static str| {
        let mut variables = TORCHRUN.to_vec();
        variables.retain(|(of, _)| *of != name);
        if !value.is_empty() {
            variables.push((name, value));
        }
        find(&variables).unwrap_err().to_string()
    };
    for (text, expected) in [
        (with("RANK", ""), "RANK is not set"),
        (with("MASTER_PORT", ""), "MASTER_PORT is not set"),
        (with("MASTER_PORT", "70000"), "expected a number in MASTER_PORT, found \"70000\""),
        (with("RANK", "-1"), "expected a number in RANK, found \"-1\""),
        (with("RANK", "4"), "found rank 4 of 4, from RANK and WORLD_SIZE"),
        (with("WORLD_SIZE", "0"), "found rank 3 of 0"),
        (with("WORLD_SIZE", "4.0"), "expected a number in WORLD_SIZE, found \"4.0\""),
        (with("LOCAL_RANK", "4"), "below the world size of 4, found 4, from RANK and WORLD_SIZE"),
        (with("LOCAL_RANK", "cuda:0"), "expected a number in LOCAL_RANK, found \"cuda:0\""),
        (with("MASTER_ADDR", ""), "MASTER_ADDR is not set"),
        (with("MASTER_PORT", "0"), "expected a port from 1 to 65535, found 0"),
        (
            with("TORCHELASTIC_USE_AGENT_STORE", "1"),
            "expected True or False in TORCHELASTIC_USE_AGENT_STORE, found \"1\"",
        ),
        (with("TORCHELASTIC_RESTART_COUNT", "-"), "a number in TORCHELASTIC_RESTART_COUNT"),
    ] {
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("cannot determine the rank of this process"), "{text}");
    }
}

#[test]
fn contradicting_variables_of_slurm_are_named() {
    for (name, value, expected) in [
        ("SLURM_PROCID", "12", "found rank 12 of 12, from srun"),
        ("SLURM_PROCID", "a", "expected a number in SLURM_PROCID, found \"a\""),
        ("SLURM_NTASKS", "12(x3)", "expected a number in SLURM_NTASKS, found \"12(x3)\""),
        ("SLURM_STEP_NUM_TASKS", "5", "found rank 5 of 5, from srun"),
        ("SLURM_STEP_NUM_NODES", "3-4", "expected a number in SLURM_STEP_NUM_NODES"),
        ("SLURM_STEP_NODELIST", "n[07-09", "unclosed bracket (hint: set MASTER_ADDR"),
        ("SLURM_LOCALID", "12", "below the world size of 12, found 12, from srun"),
        ("SLURM_JOB_ID", "70012_3", "expected a number in SLURM_JOB_ID, found \"70012_3\""),
        ("SLURM_STEP_ID", "batch", "expected a number in SLURM_STEP_ID, found \"batch\""),
        ("SLURM_RESTART_COUNT", "x", "expected a number in SLURM_RESTART_COUNT, found \"x\""),
        ("MASTER_PORT", "0", "expected a port from 1 to 65535, found 0, from srun"),
    ] {
        let text = find(&[&SRUN[..], &[(name, value)]].concat()).unwrap_err().to_string();
        assert!(text.contains(expected), "{name}={value}: {text}");
    }
}
