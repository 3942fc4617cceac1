use super::*;

/// The tokens of a tiktoken vocabulary, in the order of their ids.
fn tokens(theirs: &tiktoken_rs::CoreBPE, count: u32) -> Vec<(Vec<u8>, u32)> {
    let token = |id| Some((theirs.decode_bytes(&[id]).ok()?, id));
    (0..count).filter_map(token).collect()
}

fn from_ranks(tokens: &[(Vec<u8>, u32)], pattern: Pattern) -> Result<Bpe, Unfit> {
    Bpe::from_ranks(tokens.iter().map(|(token, id)| (token.as_slice(), *id)), pattern)
}

/// Random text of few characters, so that all classes of a pattern meet.
fn random_text(state: &mut u64, chars: usize) -> String {
    let few: Vec<char> = "aab BCsStTlLeE''''  \n\n\r\t123.,/!-中国的，。あー・éÉʰǅß\u{301}\
         \u{17f}\u{a0}\u{3000}\u{200d}\u{1}½😀"
        .chars()
        .collect();
    let mut next = || {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*state >> 33) as usize
    };
    (0..chars).map(|_| few[next() % few.len()]).collect()
}

#[test]
fn ids_equal_those_of_tiktoken() {
    let vocabularies = [
        (tiktoken_rs::r50k_base().unwrap(), 50_256, Pattern::Gpt2),
        (tiktoken_rs::cl100k_base().unwrap(), 100_256, Pattern::Cl100k),
        (tiktoken_rs::o200k_base().unwrap(), 199_998, Pattern::O200k),
    ];
    for (theirs, count, pattern) in vocabularies {
        let tokens = tokens(&theirs, count);
        assert_eq!(tokens.len(), count as usize);
        let ours = from_ranks(&tokens, pattern).unwrap();
        let mut encoder = ours.encoder();
        let mut state = 0x5eed_0007;
        for round in 0..2000 {
            let text = random_text(&mut state, 1 + round % 200);
            let expected = theirs.encode_ordinary(&text);
            let (mut ids, mut plain_ids) = (Vec::new(), Vec::new());
            encoder.encode(&text, &mut ids);
            ours.encode(&text, &mut plain_ids);
            assert_eq!(ids, expected, "{pattern:?} with its cache, on {text:?}");
            assert_eq!(plain_ids, expected, "{pattern:?} without a cache, on {text:?}");
        }
    }
}

#[test]
fn unfit_vocabularies_are_refused() {
    let bytes: Vec<(Vec<u8>, u32)> = (0..=255).map(|byte| (vec![byte], u32::from(byte))).collect();
    let with = |token: &[u8], id: u32| {
        let mut tokens = bytes.clone();
        tokens.push((token.to_vec(), id));
        from_ranks(&tokens, Pattern::Whole)
    };
    assert!(with(b"ab", 256).is_ok());
    for (token, id, words) in [
        (b"".as_slice(), 256, "0 bytes of token 256"),
        (b"a", 256, "ids 97 and 256 for the same bytes"),
        (b"ab", 1 << 21, "id 2097152"),
        (&[0; 1025], 256, "1025 bytes of token 256"),
    ] {
        let unfit = with(token, id).unwrap_err();
        assert!(unfit.found.contains(words), "{unfit:?}");
    }
    let mut twice = bytes.clone();
    twice.extend([(b"ab".to_vec(), 300), (b"cd".to_vec(), 300)]);
    assert!(from_ranks(&twice, Pattern::Whole).unwrap_err().found.contains("id 300 twice"));
    let unfit = from_ranks(&bytes[1..], Pattern::Whole).unwrap_err();
    assert!(unfit.found.contains("none for byte 0x00"), "{unfit:?}");
}

/// The two parts of a text that is cut at an allowed position give the ids of the whole.
#[test]
fn cuts_change_no_ids() {
    let theirs = tiktoken_rs::r50k_base().unwrap();
    let tokens = tokens(&theirs, 50_256);
    let mut state = 0x5eed_0009;
    let mut cuts = 0;
    for pattern in [
        Pattern::Gpt2,
        Pattern::Cl100k,
        Pattern::O200k,
        Pattern::Llama3,
        Pattern::Qwen2,
        Pattern::Qwen35,
        Pattern::DeepSeekV3,
        Pattern::Whole,
    ] {
        let bpe = from_ranks(&tokens, pattern).unwrap();
        let encode = |text: &str| {
            let mut ids = Vec::new();
            bpe.encode(text, &mut ids);
            ids
        };
        for _ in 0..300 {
            let text = random_text(&mut state, 60);
            let whole = encode(&text);
            for at in 0..=text.len() {
                let Some(cut) = bpe.cut_after(&text, at) else { continue };
                assert!(cut >= at && cut < text.len(), "{at}, {cut} of {text:?}");
                let mut parts = encode(&text[..cut]);
                parts.extend(encode(&text[cut..]));
                assert_eq!(parts, whole, "{pattern:?} at {cut} of {text:?}");
                cuts += 1;
            }
        }
        assert_eq!(bpe.cut_after("a", 7), None);
        assert_eq!(bpe.cut_after("", 0), None);
        assert_eq!(bpe.cut_after(&"1".repeat(3 << 20), 1), None, "it gives up");
    }
    assert!(cuts > 10_000, "{cuts}");
}

/// Chinese is merged by characters: with every vocabulary, and with merges of few kinds of bytes,
/// so that they cross characters and reach far, the result must equal merging the whole.
#[test]
fn merging_by_characters_equals_merging_by_bytes() {
    let theirs = tiktoken_rs::cl100k_base().unwrap();
    let mut vocabularies = vec![from_ranks(&tokens(&theirs, 100_256), Pattern::Whole).unwrap()];
    let mut state = 0x5eed_000b_u64;
    let mut next = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % limit
    };
    let chars: Vec<char> = "的一是中国语言あー。龥\u{3000}é😀a".chars().collect();
    let text = |next: &mut dyn FnMut(usize) -> usize, len: usize| -> String {
        (0..len).map(|_| chars[next(chars.len())]).collect()
    };
    for _ in 0..60 {
        // Tokens are parts of a text, at any byte, and all parts of them that result from halving.
        let mut all: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let sample = text(&mut next, 200);
        for _ in 0..40 {
            let start = next(sample.len() - 12);
            let mut part = &sample.as_bytes()[start..start + 2 + next(10)];
            let mut parts = Vec::new();
            while part.len() > 1 {
                parts.push(part.to_vec());
                let middle = 1 + next(part.len() - 1);
                part = if next(2) == 0 { &part[..middle] } else { &part[middle..] };
            }
            parts.reverse();
            parts.retain(|part| !all.contains(part));
            all.extend(parts);
        }
        let tokens: Vec<_> = all.into_iter().zip(0..).collect();
        vocabularies.push(from_ranks(&tokens, Pattern::Whole).unwrap());
    }
    for bpe in &vocabularies {
        let (mut scratch, mut memory) = (MergeBuffers::default(), CharMergeBuffers::new());
        for round in 0..60 {
            let len = 2 + next(if round == 0 { 3000 } else { 60 });
            let text = format!("中{}", text(&mut next, len));
            let (mut by_char, mut expected) = (Vec::new(), Vec::new());
            bpe.merger.merge(text.as_bytes(), &mut scratch, &mut expected);
            let parts = (&mut scratch, &mut memory);
            if bpe.by_char.merge(&bpe.merger, text.as_bytes(), parts, &mut by_char) {
                assert_eq!(by_char, expected, "on {text}");
            } else {
                assert!(by_char.is_empty());
            }
        }
    }
}
