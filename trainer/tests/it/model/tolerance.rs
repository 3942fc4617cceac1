//! How far tensor and sequence parallel training differs from training on one rank:
//! docs/guarantees.md has the bounds. `FEEDLINE_STEPS=50 FEEDLINE_GRID=full cargo test -p trainer
//! --test it model::tolerance:: -- --nocapture` prints it.

#![expect(clippy::print_stdout, reason = "the table is printed")]

use crate::ranks::{Layout, on_ranks};
use loader::batch::{Batch, T5Batch};
use tch::{Kind, Tensor};
use trainer::config::Config;
use trainer::mesh::DeviceMesh;
use trainer::model::input::Input;
use trainer::rng::Stream;
use trainer::{LocalTensor, Trainer};

const ROWS: usize = 4;
const MICRO_BATCHES: usize = 2;
const SEQ: usize = 32;
const ANSWER: usize = 16;
const VOCAB: u64 = 211;

fn steps() -> u64 {
    std::env::var("FEEDLINE_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

/// Tensor parallel ranks, and whether they share the tokens.
fn grid() -> &'static [(usize, bool)] {
    let is_full = std::env::var("FEEDLINE_GRID").is_ok_and(|grid| grid == "full");
    let all = &[(2, true), (4, false), (2, false), (4, true)];
    if is_full { all } else { &all[..2] }
}

fn config(family: &str, dtype: &str, mesh: DeviceMesh, sequence: bool) -> Config {
    let DeviceMesh { tp, pp, .. } = mesh;
    let model = match family {
        "gpt" => String::new(),
        _ => format!("dec_len = {ANSWER}\nhead_dim = 8\ninit = {{ std = 0.05 }}"),
    };
    let global = ROWS * MICRO_BATCHES;
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 50 }} }}
         data = {{ train = 'unused' }}
         batch = {{ global = {global}, micro = {ROWS} }}
         optim = {{ lr = {{ style = 'constant', peak = 0.001 }} }}
         precision = {{ dtype = '{dtype}' }}
         parallel = {{ tp = {tp}, pp = {pp}, sequence_parallel = {sequence} }}
         [model]
         family = '{family}'
         layers = 2
         hidden = 64
         heads = 4
         ffn = 160
         vocab = {VOCAB}
         seq_len = {SEQ}
         {model}"
    );
    Config::from_toml("test", &text).expect("a good config")
}

/// Sequences that count up by a step of their own, so that there is something to learn.
fn tokens(first_row: u64, len: usize, from: u64) -> Vec<i64> {
    let random = Stream::new(5, "rows");
    let row = |row: u64| {
        let [begin, step, ..] = random.block(row);
        let at = move |i: u64| (u64::from(begin) + (from + i) * u64::from(step % 7 + 1)) % VOCAB;
        (0..len as u64).map(move |i| at(i) as i64)
    };
    (first_row..first_row + ROWS as u64).flat_map(row).collect()
}

trait Family: Input + Sized {
    const NAME: &'static str;
    fn batch(number: u64) -> Self;
}

impl Family for Batch {
    const NAME: &'static str = "gpt";

    fn batch(number: u64) -> Self {
        let first_sample = number * ROWS as u64;
        Batch {
            first_sample,
            rows: ROWS,
            seq_len: SEQ,
            tokens: tokens(first_sample, SEQ, 0),
            labels: tokens(first_sample, SEQ, 1),
            loss_mask: vec![1.0; ROWS * SEQ],
            ..Batch::default()
        }
    }
}

impl Family for T5Batch {
    const NAME: &'static str = "t5";

    fn batch(number: u64) -> Self {
        let first_sample = number * ROWS as u64;
        T5Batch {
            first_sample,
            rows: ROWS,
            encoder_len: SEQ,
            decoder_len: ANSWER,
            encoder_tokens: tokens(first_sample, SEQ, 0),
            decoder_tokens: tokens(first_sample, ANSWER, SEQ as u64),
            labels: tokens(first_sample, ANSWER, SEQ as u64 + 1),
            loss_mask: vec![1.0; ROWS * ANSWER],
            encoder_mask: vec![1; ROWS * SEQ],
            decoder_mask: vec![1; ROWS * ANSWER],
            truncated: vec![false; ROWS],
        }
    }
}

/// The losses of a run, and the final weights of each rank: the tensor, the box in it, and the
/// values.
struct End {
    losses: Vec<f64>,
    boxes: Vec<(usize, Vec<[i64; 2]>, Vec<f32>)>,
}

fn run<F: Family>(dtype: &str, mesh: DeviceMesh, sequence: bool) -> End {
    let config = config(F::NAME, dtype, mesh, sequence);
    let ends = on_ranks(mesh, |comm| {
        let mut trainer = Trainer::on_mesh(&config, comm).expect("memory");
        let mut losses = Vec::new();
        for step in 1..=steps() {
            let first = (step - 1) * MICRO_BATCHES as u64;
            let batches: Vec<F> = (first..first + MICRO_BATCHES as u64).map(F::batch).collect();
            let report = trainer.step(&config.optim, &batches, step, 0.001).expect("finite");
            losses.push(report.loss);
        }
        End { losses, boxes: weights(&trainer) }
    });
    let mut ends = ends.into_iter();
    let mut first = ends.next().expect("a rank");
    for end in ends {
        assert_eq!(first.losses, end.losses, "ranks that share matrices agree on the loss");
        first.boxes.extend(end.boxes);
    }
    first
}

fn mesh(tp: usize, pp: usize) -> DeviceMesh {
    DeviceMesh { tp, pp, ..Layout::ALONE.mesh() }
}

fn weights(trainer: &Trainer) -> Vec<(usize, Vec<[i64; 2]>, Vec<f32>)> {
    let count = trainer.specs().len();
    let mut boxes = Vec::new();
    for LocalTensor { tensor, parts, .. } in trainer.parts() {
        let flat = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).reshape([-1])).expect("f32");
        // The first group is the weights, followed by their moments.
        for part in parts.into_iter().filter(|part| part.tensor < count) {
            let spans = part.region.spans.iter();
            let spans = spans.map(|span| [span.start as i64, span.len as i64]).collect();
            let at = part.offset as usize;
            let len = part.region.elements().expect("a small tensor") as usize;
            boxes.push((part.tensor, spans, flat[at..at + len].to_vec()));
        }
    }
    boxes
}

/// The largest difference of a loss, and the norm of the difference of the weights: both relative.
fn distance(one: &End, other: &End) -> (f64, f64) {
    let losses = one.losses.iter().zip(&other.losses);
    let loss = losses.map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
    let (mut apart, mut all) = (0.0, 0.0);
    for (tensor, spans, values) in &other.boxes {
        let (_, whole_spans, whole) =
            one.boxes.iter().find(|(at, ..)| at == tensor).expect("it has all");
        let shape: Vec<i64> = whole_spans.iter().map(|[_, len]| *len).collect();
        let mut expected = Tensor::from_slice(whole).view(shape.as_slice());
        for (axis, [start, len]) in spans.iter().enumerate() {
            expected = expected.narrow(axis as i64, *start, *len);
        }
        let expected = Vec::<f32>::try_from(expected.reshape([-1])).expect("f32");
        assert_eq!(expected.len(), values.len());
        for (a, b) in expected.iter().zip(values) {
            apart += f64::from(a - b).powi(2);
            all += f64::from(*a).powi(2);
        }
    }
    (loss, (apart / all).sqrt())
}

fn table<F: Family>() {
    // Bounds of the loss and of the weights after 50 steps; docs/guarantees.md names one.
    for (dtype, loss_max, weights_max) in [("fp32", 1e-6, 1e-5), ("bf16", 2e-3, 2e-2)] {
        let one = run::<F>(dtype, mesh(1, 1), false);
        for &(tp, sequence) in grid() {
            let (loss, weights) = distance(&one, &run::<F>(dtype, mesh(tp, 1), sequence));
            let name = format!("{} {dtype} tp {tp}{}", F::NAME, if sequence { " sp" } else { "" });
            println!("{name:<20} loss {loss:.1e} weights {weights:.1e}");
            assert!(loss <= loss_max, "{name}: the loss is {loss:e} off");
            assert!(weights <= weights_max, "{name}: weights are {weights:e} off");
        }
        let learned = one.losses[0] - one.losses[one.losses.len() - 1];
        assert!(learned > 0.0, "{} {dtype}: it does not learn, {:?}", F::NAME, one.losses);
        let loss = one.losses.last().expect("a step");
        println!("{:<20} loss {:.3} to {loss:.3}", format!("{} {dtype}", F::NAME), one.losses[0]);
    }
}

#[test]
fn gpt_stays_within_tolerance() {
    table::<Batch>();
}

#[test]
fn t5_stays_within_tolerance() {
    table::<T5Batch>();
}

/// Pipeline stages do not change the bits of tensor parallel ranks.
#[test]
fn stages_of_tensor_parallel_ranks_change_no_bit() {
    fn check<F: Family>() {
        let run = |pp: usize| {
            let mut end = run::<F>("fp32", mesh(2, pp), true);
            // By tensor and box; parameters of several stages appear twice.
            end.boxes.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
            end.boxes.dedup_by(|a, b| {
                let is_same_box = (a.0, &a.1) == (b.0, &b.1);
                assert!(!is_same_box || a.2 == b.2, "copies of {} differ", a.0);
                is_same_box
            });
            end
        };
        let (one, two) = (run(1), run(2));
        assert_eq!(one.losses, two.losses, "{}", F::NAME);
        assert!(one.boxes == two.boxes, "{}: weights differ", F::NAME);
    }
    check::<Batch>();
    check::<T5Batch>();
}
