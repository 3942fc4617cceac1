//! A pickle as what it says, and nothing done: classes and functions are names, calls are nodes.
//!
//! Every opcode of protocols 0 to 5 is read but those that need a registry (`EXT*`) or memory from
//! outside (`NEXT_BUFFER`). Objects are nodes of an arena, as a pickle fills containers that it has
//! remembered before, and may make cycles. An opcode makes at most one node and no node is copied,
//! so what is held is bounded by the bytes that are read.

use std::collections::HashMap;

/// A node of a [`Pickle`].
pub(crate) type Id = usize;

/// What a pickle says.
#[derive(Debug)]
pub(crate) enum Node {
    None,
    /// Its value is of use to nobody here but tests.
    Bool(#[cfg_attr(not(test), expect(dead_code, reason = "no checkpoint is told by one"))] bool),
    Int(i64),
    Float(f64),
    Text(String),
    /// Bytes, and integers beyond 64 bits.
    Bytes(Vec<u8>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(String, String),
    /// Something that the pickle's environment knows by this name.
    Persistent(Id),
    Built(Box<Built>),
}

/// An object that calling something would give.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) class: Id,
    pub(crate) args: Id,
    pub(crate) state: Option<Id>,
    pub(crate) items: Vec<Id>,
    pub(crate) pairs: Vec<(Id, Id)>,
}

/// A pickle that was read.
#[derive(Debug)]
pub(crate) struct Pickle {
    nodes: Vec<Node>,
    pub(crate) root: Id,
}

/// Why bytes are no pickle, and where.
#[derive(Debug)]
pub(crate) struct Bad {
    pub(crate) offset: usize,
    pub(crate) why: String,
    /// Whether more bytes might mend it.
    pub(crate) is_short: bool,
}

type Result<T> = std::result::Result<T, Bad>;

impl Pickle {
    /// Reads the pickle in front of the bytes, and tells how long it is.
    pub(crate) fn read(bytes: &[u8]) -> Result<(Self, usize)> {
        let mut machine = Machine { bytes, at: 0, ..Machine::default() };
        let root = machine.run()?;
        Ok((Pickle { nodes: machine.nodes, root }, machine.at))
    }

    /// All nodes.
    pub(crate) fn ids(&self) -> std::ops::Range<Id> {
        0..self.nodes.len()
    }

    pub(crate) fn node(&self, id: Id) -> &Node {
        &self.nodes[id]
    }

    pub(crate) fn text(&self, id: Id) -> Option<&str> {
        if let Node::Text(text) = self.node(id) { Some(text) } else { None }
    }

    pub(crate) fn int(&self, id: Id) -> Option<i64> {
        if let Node::Int(value) = self.node(id) { Some(*value) } else { None }
    }

    pub(crate) fn size(&self, id: Id) -> Option<u64> {
        self.int(id)?.try_into().ok()
    }

    /// The elements of a list, a tuple, or a subclass of them such as `torch.Size`.
    pub(crate) fn items(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::List(items) | Node::Tuple(items) => Some(items),
            Node::Built(built) if !built.items.is_empty() => Some(&built.items),
            Node::Built(built) => match self.node(built.args) {
                Node::Tuple(args) if args.len() == 1 => match self.node(args[0]) {
                    Node::List(items) | Node::Tuple(items) => Some(items),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    pub(crate) fn sizes(&self, id: Id) -> Option<Vec<u64>> {
        self.items(id)?.iter().map(|&item| self.size(item)).collect()
    }

    /// The pairs of a dict or of a subclass of it.
    pub(crate) fn pairs(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(pairs) => Some(pairs),
            Node::Built(built) if !built.pairs.is_empty() || self.is_map(built.class) => {
                Some(&built.pairs)
            }
            _ => None,
        }
    }

    fn is_map(&self, class: Id) -> bool {
        matches!(self.node(class), Node::Global(_, name) if name.ends_with("dict")
            || name.ends_with("Dict"))
    }

    /// The value of a key of a dict, or of an attribute of an object.
    pub(crate) fn get(&self, id: Id, key: &str) -> Option<Id> {
        let find = |pairs: &[(Id, Id)]| {
            pairs.iter().rev().find(|(name, _)| self.text(*name) == Some(key)).map(|pair| pair.1)
        };
        if let Some(found) = self.pairs(id).and_then(find) {
            return Some(found);
        }
        let Node::Built(built) = self.node(id) else { return None };
        let state = built.state?;
        if let Some(found) = self.pairs(state).and_then(find) {
            return Some(found);
        }
        // A class with slots has its attributes second.
        let Node::Tuple(both) = self.node(state) else { return None };
        self.pairs(*both.get(1)?).and_then(find)
    }

    /// The value at the end of a path of keys.
    pub(crate) fn path(&self, id: Id, keys: &[&str]) -> Option<Id> {
        keys.iter().try_fold(id, |id, key| self.get(id, key))
    }

    /// Module and name of the function or class that made an object, and its arguments.
    pub(crate) fn call(&self, id: Id) -> Option<(&str, &str, &[Id])> {
        let Node::Built(built) = self.node(id) else { return None };
        let (Node::Global(module, name), Node::Tuple(args)) =
            (self.node(built.class), self.node(built.args))
        else {
            return None;
        };
        Some((module, name, args))
    }
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    /// The height of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Id> {
        loop {
            let opcode = self.take(1)?[0];
            if opcode == b'.' {
                return self.pop();
            }
            let known =
                self.constants(opcode)? || self.containers(opcode)? || self.objects(opcode)?;
            if !known {
                self.at -= 1;
                return self.bad(format!("opcode {opcode:#04x}"));
            }
        }
    }

    /// Numbers, texts and bytes.
    fn constants(&mut self, opcode: u8) -> Result<bool> {
        let node = match opcode {
            b'N' => Node::None,
            0x88 => Node::Bool(true),
            0x89 => Node::Bool(false),
            b'J' => Node::Int(i32::from_le_bytes(self.fixed()?).into()),
            b'K' => Node::Int(self.take(1)?[0].into()),
            b'M' => Node::Int(u16::from_le_bytes(self.fixed()?).into()),
            b'I' => match self.line()?.as_str() {
                "00" => Node::Bool(false),
                "01" => Node::Bool(true),
                digits => self.decimal(digits)?,
            },
            b'L' => {
                let line = self.line()?;
                self.decimal(line.trim_end_matches('L'))?
            }
            0x8a => {
                let len = self.take(1)?[0].into();
                long(self.take(len)?)
            }
            0x8b => {
                let len = u32::from_le_bytes(self.fixed()?) as usize;
                long(self.take(len)?)
            }
            b'F' => match self.line()?.parse() {
                Ok(value) => Node::Float(value),
                Err(_) => return self.bad("a number that is none".to_owned()),
            },
            b'G' => {
                let mut bytes: [u8; 8] = self.fixed()?;
                bytes.reverse();
                Node::Float(f64::from_le_bytes(bytes))
            }
            b'S' => {
                let line = self.line()?;
                Node::Text(line.trim_matches(['\'', '"']).to_owned())
            }
            b'V' => Node::Text(self.line()?),
            b'X' | b'T' | 0x8d | 0x8c | b'U' => {
                let bytes = self.counted(opcode)?;
                Node::Text(String::from_utf8_lossy(bytes).into_owned())
            }
            b'B' | b'C' | 0x8e | 0x96 => Node::Bytes(self.counted(opcode)?.to_vec()),
            _ => return Ok(false),
        };
        self.push(node);
        Ok(true)
    }

    /// Lists, tuples, dicts and sets, and the stack.
    fn containers(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'}' => self.push(Node::Dict(Vec::new())),
            b']' | 0x8f => self.push(Node::List(Vec::new())),
            b')' => self.push(Node::Tuple(Vec::new())),
            b't' => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items));
            }
            b'l' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(Node::List(items));
            }
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = self.paired(&items)?;
                self.push(Node::Dict(pairs));
            }
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let items = self.pop_many(count)?;
                self.push(Node::Tuple(items));
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Classes, calls, the memo and the frame of the stream.
    fn objects(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Node::Global(module, name));
            }
            0x93 => {
                let both = self.pop_many(2)?;
                let text = |id: Id| match &self.nodes[id] {
                    Node::Text(text) => Some(text.clone()),
                    _ => None,
                };
                let (Some(module), Some(name)) = (text(both[0]), text(both[1])) else {
                    return self.bad("a class whose name is no text".to_owned());
                };
                self.push(Node::Global(module, name));
            }
            b'R' | 0x81 => {
                let both = self.pop_many(2)?;
                self.build(both[0], both[1]);
            }
            0x92 => {
                let three = self.pop_many(3)?;
                self.build(three[0], three[1]);
            }
            b'o' => {
                let mut items = self.pop_mark()?;
                if items.is_empty() {
                    return self.bad("an object without a class".to_owned());
                }
                let class = items.remove(0);
                let args = self.add(Node::Tuple(items));
                self.build(class, args);
            }
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                let items = self.pop_mark()?;
                let (class, args) =
                    (self.add(Node::Global(module, name)), self.add(Node::Tuple(items)));
                self.build(class, args);
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                if let Node::Built(built) = &mut self.nodes[object] {
                    built.state = Some(state);
                }
            }
            b'Q' => {
                let name = self.pop()?;
                self.push(Node::Persistent(name));
            }
            b'P' => {
                let line = self.line()?;
                let name = self.add(Node::Text(line));
                self.push(Node::Persistent(name));
            }
            _ => return self.memoize(opcode),
        }
        Ok(true)
    }

    fn memoize(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            b'p' | b'q' | b'r' | 0x94 => {
                let key = if opcode == 0x94 { self.memo.len() as u64 } else { self.key(opcode)? };
                let top = self.top()?;
                self.memo.insert(key, top);
            }
            b'g' | b'h' | b'j' => {
                let key = self.key(opcode)?;
                let Some(&id) = self.memo.get(&key) else {
                    return self.bad(format!("a memory {key} that was never made"));
                };
                self.stack.push(id);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn key(&mut self, opcode: u8) -> Result<u64> {
        match opcode {
            b'q' | b'h' => Ok(self.take(1)?[0].into()),
            b'r' | b'j' => Ok(u32::from_le_bytes(self.fixed()?).into()),
            _ => match self.line()?.parse() {
                Ok(key) => Ok(key),
                Err(_) => self.bad("a memory without a number".to_owned()),
            },
        }
    }

    fn build(&mut self, class: Id, args: Id) {
        let (state, items, pairs) = (None, Vec::new(), Vec::new());
        self.push(Node::Built(Box::new(Built { class, args, state, items, pairs })));
    }

    fn append(&mut self, items: Vec<Id>) -> Result<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(list) => list.extend(items),
            Node::Built(built) => built.items.extend(items),
            _ => return self.bad("items for what is no list".to_owned()),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Result<()> {
        let pairs = self.paired(items)?;
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::Dict(dict) => dict.extend(pairs),
            Node::Built(built) => built.pairs.extend(pairs),
            _ => return self.bad("pairs for what is no dict".to_owned()),
        }
        Ok(())
    }

    fn paired(&self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        if !items.len().is_multiple_of(2) {
            return self.bad("a key without a value".to_owned());
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn decimal(&self, digits: &str) -> Result<Node> {
        match digits.parse() {
            Ok(value) => Ok(Node::Int(value)),
            // Beyond 64 bits there is nothing that we ask for.
            Err(_) if digits.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit()) => {
                Ok(Node::Bytes(digits.as_bytes().to_vec()))
            }
            Err(_) => self.bad("a number that is none".to_owned()),
        }
    }

    fn counted(&mut self, opcode: u8) -> Result<&[u8]> {
        let len = match opcode {
            b'U' | b'C' | 0x8c => self.take(1)?[0].into(),
            b'X' | b'T' | b'B' => u32::from_le_bytes(self.fixed()?).into(),
            _ => u64::from_le_bytes(self.fixed()?),
        };
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return self.short();
        };
        self.at += len + 1;
        Ok(String::from_utf8_lossy(&rest[..len]).into_owned())
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn take(&mut self, len: usize) -> Result<&[u8]> {
        if len > self.bytes.len() - self.at {
            return self.short();
        }
        self.at += len;
        Ok(&self.bytes[self.at - len..self.at])
    }

    fn add(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn push(&mut self, node: Node) {
        let id = self.add(node);
        self.stack.push(id);
    }

    fn pop(&mut self) -> Result<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// What is on top, and above the last mark.
    fn top(&self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(&id) if self.stack.len() > floor => Ok(id),
            _ => self.bad("an empty stack".to_owned()),
        }
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Id>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(self.stack.split_off(start)),
            _ => self.bad("an empty stack".to_owned()),
        }
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => self.bad("no mark".to_owned()),
        }
    }

    fn bad<T>(&self, why: String) -> Result<T> {
        Err(Bad { offset: self.at, why, is_short: false })
    }

    fn short<T>(&self) -> Result<T> {
        let why = "the end of the bytes".to_owned();
        Err(Bad { offset: self.at, why, is_short: true })
    }
}

/// A two's complement integer of any length, little-endian.
fn long(bytes: &[u8]) -> Node {
    if bytes.len() > 8 {
        return Node::Bytes(bytes.to_vec());
    }
    let fill = if bytes.last().is_some_and(|&last| last >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Node::Int(i64::from_le_bytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python's `pickle.dumps` gives for `{"a": [1, -2, 3.5, None, True], "b": (b"x", 300)}`,
    /// by protocols 0, 2 and 4.
    const DUMPS: [&[u8]; 3] = [
        b"(dp0\nVa\np1\n(lp2\nI1\naI-2\naF3.5\naNaI01\nasVb\np3\n(c_codecs\nencode\np4\n(Vx\np5\n\
          Vlatin1\np6\ntp7\nRp8\nI300\ntp9\ns.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@\x0c\x00\x00\x00\
          \x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03c_codecs\nencode\nq\x04X\x01\x00\x00\x00xq\x05X\
          \x06\x00\x00\x00latin1q\x06\x86q\x07Rq\x08M,\x01\x86q\x09u.",
        b"\x80\x04\x95*\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffG\
          @\x0c\x00\x00\x00\x00\x00\x00N\x88e\x8c\x01b\x94C\x01x\x94M,\x01\x86\x94u.",
    ];

    #[test]
    fn protocols_agree() {
        for dump in DUMPS {
            let (pickle, len) = Pickle::read(dump).unwrap();
            assert_eq!(len, dump.len());
            let a = pickle.items(pickle.get(pickle.root, "a").unwrap()).unwrap();
            assert_eq!(pickle.int(a[1]), Some(-2));
            assert!(matches!(pickle.node(a[2]), Node::Float(3.5)));
            assert!(matches!(pickle.node(a[3]), Node::None));
            assert!(matches!(pickle.node(a[4]), Node::Bool(true)));
            let b = pickle.items(pickle.get(pickle.root, "b").unwrap()).unwrap();
            assert_eq!(pickle.int(b[1]), Some(300));
        }
    }

    /// No byte string makes it panic, and no prefix of a pickle is one.
    #[test]
    fn anything_is_refused_calmly() {
        let mut state = 7_u64;
        for dump in DUMPS {
            for len in 0..dump.len() {
                assert!(Pickle::read(&dump[..len]).is_err(), "{len} bytes");
            }
            for round in 0..20_000 {
                let mut bytes = dump.to_vec();
                for _ in 0..1 + round % 3 {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let place = (state >> 33) as usize % bytes.len();
                    bytes[place] = (state >> 24) as u8;
                }
                if let Ok((pickle, _)) = Pickle::read(&bytes) {
                    pickle.get(pickle.root, "a").and_then(|id| pickle.items(id));
                }
            }
        }
    }

    #[test]
    fn cycles_and_long_integers() {
        // A list that holds itself.
        let (pickle, _) = Pickle::read(b"\x80\x02]q\x00h\x00a.").unwrap();
        assert_eq!(pickle.items(pickle.root), Some(&[pickle.root][..]));
        let (pickle, _) = Pickle::read(b"\x8a\x02\x00\xff.").unwrap();
        assert_eq!(pickle.int(pickle.root), Some(-256));
        let (pickle, _) = Pickle::read(b"\x8a\x0900000000\x01.").unwrap();
        assert!(matches!(pickle.node(pickle.root), Node::Bytes(_)));
    }
}
