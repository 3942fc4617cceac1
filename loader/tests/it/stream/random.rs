//! Samples read by number, and calls in equal strides as an order of their own.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use indexed::Dtype;
use loader::batch::{GptAssemble, GptConfig};
use loader::{CallOrder, Error, Loader, LoaderOptions, RandomReader, SampleOrder};

use super::corpus::{Corpus, SAMPLES, SEQ_LEN, digest_of, order, rows, stream};

fn assemble() -> GptAssemble {
    GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap()
}

#[test]
fn random_samples_equal_the_stream() {
    let corpus = Corpus::new();
    let mut reader = RandomReader::new(order(&corpus.store()), assemble(), true);
    // Every sample once, in a scattered order: 7 has no common divisor with their number.
    let numbers: Vec<u64> = (0..SAMPLES).map(|nth| nth * 7 % SAMPLES).collect();
    let mut texts = vec![Vec::new(); SAMPLES as usize];
    for call in numbers.chunks(11) {
        let batch = reader.read(call).unwrap();
        assert_eq!((batch.rows, batch.first_sample), (call.len(), call[0]));
        let mut read = Vec::new();
        rows(&batch, &mut read);
        for (number, (_, text)) in call.iter().zip(read) {
            texts[*number as usize] = text;
        }
    }
    assert_eq!(digest_of(texts.iter()), corpus.expected_digest);
    let twice = reader.read(&[5, 5]).unwrap();
    assert_eq!(twice.tokens[..SEQ_LEN], twice.tokens[SEQ_LEN..]);
    assert_eq!(reader.read(&[]).unwrap().rows, 0);
    let beyond = reader.read(&[0, u64::MAX]).unwrap_err();
    assert!(matches!(beyond, Error::TooFewSamples { .. }), "{beyond}");
}

#[test]
fn random_reads_detect_corruption() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let order = order(&store);
    let path = std::path::Path::new(&corpus.path).join("corpus.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let read_all = |verify| {
        let mut reader = RandomReader::new(Arc::clone(&order), assemble(), verify);
        (0..SAMPLES).try_for_each(|sample| reader.read(&[sample]).map(|_| ()))
    };
    let error = read_all(true).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::Corrupt { .. })), "{error}");
    read_all(false).unwrap();
}

#[test]
fn equal_strides_are_an_order() {
    let corpus = Corpus::new();
    let inner = order(&corpus.store());
    let all = inner.sample_count();
    let number = |calls: &CallOrder, sample| calls.origin(sample).sample;
    for (first, step) in [(vec![0], 1), (vec![4, 5, 6], 12), (vec![9, 3], 2), (vec![all - 1], 1)] {
        let calls = CallOrder::new(Arc::clone(&inner), first.clone(), step).unwrap();
        let count = calls.sample_count() / first.len() as u64;
        for call in 0..count {
            for (nth, sample) in first.iter().enumerate() {
                let at = call * first.len() as u64 + nth as u64;
                assert_eq!(number(&calls, at), sample + call * step);
            }
        }
        let next = first.iter().max().unwrap() + count * step;
        assert!(next >= all, "a call is missing: {next}");
        let until = calls.together_until(0);
        assert!((1..=calls.sample_count()).contains(&until));
    }
    for (first, step) in [(vec![], 1), (vec![all], 1), (vec![0], 0)] {
        let refused = CallOrder::new(Arc::clone(&inner), first, step).unwrap_err();
        assert!(matches!(refused, Error::Option { .. }), "{refused}");
    }
    // The calls of three ranks together cover the stream.
    let mut texts = vec![Vec::new(); all as usize];
    for rank in 0..3 {
        let first = (0..4).map(|row| 4 * rank + row).collect();
        let calls = Arc::new(CallOrder::new(Arc::clone(&inner), first, 12).unwrap());
        let options = LoaderOptions::new(4, 0..calls.sample_count());
        let mut loader = Loader::start(calls.clone(), assemble(), options).unwrap();
        for (at, text) in stream(&mut loader) {
            texts[number(&calls, at) as usize] = text;
        }
    }
    assert_eq!(digest_of(texts[..SAMPLES as usize].iter()), corpus.expected_digest);
}

#[test]
fn poll_batch_waits_no_longer_than_requested() {
    let corpus = Corpus::new();
    let options = LoaderOptions::new(3, 0..SAMPLES);
    let mut loader = Loader::start(order(&corpus.store()), assemble(), options).unwrap();
    let (mut texts, mut pending) = (Vec::new(), 0);
    loop {
        match loader.poll_batch(Duration::ZERO).unwrap() {
            Poll::Pending => pending += 1,
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => rows(&batch, &mut texts),
        }
    }
    assert!(pending > 0, "the first batch cannot be ready at once");
    assert_eq!(digest_of(texts.iter().map(|(_, text)| text)), corpus.expected_digest);
    assert_eq!(loader.samples_consumed(), SAMPLES);
}

#[test]
fn recycler_returns_memory_to_the_loader() {
    let corpus = Corpus::new();
    let options = LoaderOptions::new(2, 0..SAMPLES);
    let mut loader = Loader::start(order(&corpus.store()), assemble(), options).unwrap();
    let recycler = loader.recycler();
    let batch = loader.next_batch().unwrap().unwrap();
    let place = batch.tokens.as_ptr();
    recycler.clone().recycle(batch);
    let is_again = |batch: &loader::Batch| batch.tokens.as_ptr() == place;
    let found = std::iter::from_fn(|| loader.next_batch().unwrap()).any(|batch| is_again(&batch));
    assert!(found, "no later batch is in the memory that was returned");
    let batch = loader::Batch::default();
    drop(loader);
    recycler.recycle(batch);
}
