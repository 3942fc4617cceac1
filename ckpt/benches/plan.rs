//! Plans a save of a GPT of 96 layers by 320 processes, about a hundred thousand chunks, and makes
//! a small save to measure the manifest:
//!
//! ```text
//! cargo bench -p ckpt --bench plan
//! ```
//!
//! Every number is the median of its rounds, followed by the minimum, and the minimum CPU time,
//! which is the relevant one on a shared machine.

#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::error::Error;
use std::time::{Duration, Instant};

use ckpt::layout::{DeviceMesh, Layout, Param, TensorSplit, Zero};
use ckpt::{Checkpoints, Dtype, Group, PlanCache, PlanLimits, SavePlan};
use storage::{ByteSize, Key};

const ROUNDS: usize = 11;

fn main() -> Result<(), Box<dyn Error>> {
    let layout = gpt(12_288)?;
    let limits = PlanLimits::default();
    let held = layout.held();
    let holdings: usize = held.iter().map(Vec::len).sum();
    let plan = SavePlan::new(layout.specs(), &held, limits)?;
    let loads: Vec<u64> = (0..plan.writers()).map(|writer| plan.bytes(writer)).collect();
    let (least, most) = (loads.iter().min().unwrap_or(&0), loads.iter().max().unwrap_or(&0));
    println!(
        "{} tensors, {} writers, {holdings} holdings, {} chunks in {} files, {}",
        layout.specs().len(),
        plan.writers(),
        plan.chunks(),
        plan.all_shards().count(),
        ByteSize(loads.iter().sum())
    );
    println!("bytes of a writer: {} to {}", ByteSize(*least), ByteSize(*most));
    time("layout of all ranks", || Ok(layout.held()))?;
    time("layout of one rank", || Ok(layout.holdings(100)))?;
    time("plan", || Ok(SavePlan::new(layout.specs(), &held, limits)?))?;
    let cache = PlanCache::default();
    cache.plan(layout.specs(), &held, limits)?;
    time("plan, cached", || Ok(cache.plan(layout.specs(), &held, limits)?))?;

    let small = gpt(64)?;
    let folder = tempfile::tempdir()?;
    let url = folder.path().to_str().ok_or("the folder's name is not UTF-8")?;
    let steps = Checkpoints::open(storage::open_url(url)?, Key::new("run")?);
    let plan = SavePlan::new(small.specs(), &small.held(), limits)?;
    let bytes: Vec<Vec<Vec<u8>>> = small
        .held()
        .iter()
        .map(|held| {
            let bytes = |holding: &ckpt::HeldRegion| {
                let item_bytes = small.specs()[holding.tensor].dtype.item_bytes();
                vec![7; (holding.region.elements().unwrap_or(0) * item_bytes) as usize]
            };
            held.iter().map(bytes).collect()
        })
        .collect();
    let held: Vec<Vec<&[u8]>> =
        bytes.iter().map(|held| held.iter().map(Vec::as_slice).collect()).collect();
    let report = steps.save_plan(1, &plan, &held, &[], serde_json::Value::Null)?;
    println!("{} chunks in small: {report}", plan.chunks());
    let manifest = folder.path().join("run/step-000000000001/MANIFEST.json");
    println!("manifest: {}", ByteSize(std::fs::metadata(manifest)?.len()));
    time("open, manifest checked", || Ok(steps.open_step(1)?))
}

/// 96 layers on 8 tensor parallel, 8 pipeline and 5 data parallel ranks, with ZeRO.
fn gpt(hidden: u64) -> Result<Layout, Box<dyn Error>> {
    let mesh = DeviceMesh { tp: 8, pp: 8, dp: 5, zero: Zero::One, ..DeviceMesh::default() };
    let mut params = Vec::new();
    let mut push = |name: String, shape: &[u64], split, stages: &[u64]| {
        params.push(Param { name, shape: shape.to_vec(), split, stages: stages.to_vec() });
    };
    let qkv = || TensorSplit::fused(&[hidden; 3]);
    let vocab = TensorSplit::Padded { rows: 51_200 };
    push("embed.weight".to_owned(), &[50_257, hidden], vocab, &[0, 7]);
    for layer in 0..96 {
        let stage = [DeviceMesh::stage_of_layer(0, 8, layer, 96)];
        let name = |what: &str| format!("transformer.layers.{layer}.{what}");
        for norm in ["input_norm.weight", "input_norm.bias", "norm.weight", "norm.bias"] {
            push(name(norm), &[hidden], TensorSplit::Replicate, &stage);
        }
        push(name("attention.qkv.weight"), &[3 * hidden, hidden], qkv(), &stage);
        push(name("attention.qkv.bias"), &[3 * hidden], qkv(), &stage);
        push(name("attention.out.weight"), &[hidden, hidden], TensorSplit::Axis(1), &stage);
        push(name("attention.out.bias"), &[hidden], TensorSplit::Replicate, &stage);
        push(name("mlp.up.weight"), &[4 * hidden, hidden], TensorSplit::Axis(0), &stage);
        push(name("mlp.up.bias"), &[4 * hidden], TensorSplit::Axis(0), &stage);
        push(name("mlp.down.weight"), &[hidden, 4 * hidden], TensorSplit::Axis(1), &stage);
        push(name("mlp.down.bias"), &[hidden], TensorSplit::Replicate, &stage);
    }
    push("norm.weight".to_owned(), &[hidden], TensorSplit::Replicate, &[7]);
    let moments = [Group::Master, Group::ExpAvg, Group::ExpAvgSq].map(|group| (group, Dtype::F32));
    let groups = [&[(Group::Model, Dtype::BF16)][..], &moments].concat();
    Ok(Layout::new(mesh, params, &groups)?)
}

fn time<T>(
    what: &str,
    mut work: impl FnMut() -> Result<T, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let (mut times, mut cpu_times) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (started, cpu_started) = (Instant::now(), cpu_time()?);
        let made = work()?;
        times.push(started.elapsed());
        cpu_times.push(cpu_time()? - cpu_started);
        drop(made);
    }
    times.sort_unstable();
    cpu_times.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (median, least, cpu) = (ms(times[ROUNDS / 2]), ms(times[0]), ms(cpu_times[0]));
    println!("{what}: {median:.1} ms, at best {least:.1} ms, of a CPU {cpu:.1} ms");
    Ok(())
}

/// The CPU time of this thread.
fn cpu_time() -> Result<Duration, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos = text.split(' ').next().ok_or("an empty schedstat")?;
    Ok(Duration::from_nanos(nanos.parse()?))
}
