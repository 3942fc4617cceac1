//! The whole state is one number: the stream resumes there, with any number of ranks.

use loader::Ranks;

use super::corpus::{Corpus, SAMPLES, digest_of, options, rows, start, stream};

#[test]
fn stream_resumes_after_any_batch() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let mut all = Vec::new();
    let mut consumed = 0;
    // Each loader reads another number of batches of another size.
    for nth in 0..20 {
        let mut options = options();
        (options.micro_batch, options.samples.start) = (1 + nth % 7, consumed);
        let mut loader = start(&store, options);
        for _ in 0..nth {
            rows(&loader.next_batch().unwrap().unwrap(), &mut all);
        }
        consumed = loader.samples_consumed();
    }
    let mut options = options();
    options.samples.start = consumed;
    all.extend(stream(&mut start(&store, options)));
    assert!(all.iter().map(|(sample, _)| *sample).eq(0..SAMPLES));
    assert_eq!(digest_of(all.iter().map(|(_, text)| text)), corpus.expected_digest);
}

#[test]
fn stream_is_independent_of_the_number_of_ranks() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let mut all = Vec::new();
    let mut consumed = 0;
    // The number of ranks changes, and no sample is read twice or skipped.
    for (of, batches) in [(1, 5), (2, 9), (3, 7), (8, 4), (2, u64::MAX)] {
        let ranks = (0..of).map(|rank| {
            let mut options = options();
            (options.samples.start, options.ranks) = (consumed, Ranks::one(rank, of));
            start(&store, options)
        });
        let mut ranks: Vec<_> = ranks.collect();
        'steps: for _ in 0..batches {
            for rank in &mut ranks {
                let Some(batch) = rank.next_batch().unwrap() else { break 'steps };
                rows(&batch, &mut all);
            }
        }
        assert!(ranks.iter().all(|r| r.samples_consumed() == ranks[0].samples_consumed()));
        consumed = ranks[0].samples_consumed();
    }
    assert_eq!(digest_of(all.iter().map(|(_, text)| text)), corpus.expected_digest);
}
