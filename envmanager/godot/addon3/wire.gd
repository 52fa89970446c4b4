extends Reference
# The connection to the trainer: frames of a header of 12 bytes and a body, little endian.
#
# Header: u32 length of the body, u8 kind, u8 0, u16 0, u32 ticket. Every array in a body is padded to 4 bytes.
# Godot 3 has no other way from numbers to bytes than that of Variants, which puts 8 bytes (type, count) before them.

const HELLO = 1
const SPECS = 2
const STEPS = 3
const VALUE = 4
const ERROR = 5
const BUSY = 6
const NOTE = 7
const CONFIGURE = 65
const RESET = 66
const STEP = 67
const CALL = 68
const CLOSE = 69
const BEGIN = 70

const MAX_JSON = 1048576  # bytes; the trainer refuses more
const CONNECT_MS = 10000
const SPIN_US = 500  # a wait is worth looking again for so long: waking takes some 50
const REST = 20  # after one that took longer, so many sleep: another program may want a core
const FALLBACK = {"message": "the answer is over 1 MiB", "script": null, "line": null, "function": null, "arena": null}

# The request that was received last.
var kind: int = 0
var ticket: int = 0
var body: PoolByteArray = PoolByteArray()
var received_us: int = 0

# Whether there is a core for each engine and the trainer, so that an engine may keep its own while it waits.
var may_spin: bool = false

var _rest: int = 0
var _peer: StreamPeerTCP = StreamPeerTCP.new()


# Connects to "host:port"; false when nobody is there.
func connect_to(address: String) -> bool:
	var colon = address.find_last(":")
	if _peer.connect_to_host(address.left(colon), int(address.substr(colon + 1))) != OK:
		return false
	var until = OS.get_ticks_msec() + CONNECT_MS
	while _peer.get_status() == StreamPeerTCP.STATUS_CONNECTING and OS.get_ticks_msec() < until:
		OS.delay_msec(1)
	if _peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		return false
	_peer.set_no_delay(true)
	return true


# Waits for a request; false when the trainer is gone.
func receive() -> bool:
	var began_us = OS.get_ticks_usec()
	var spins = may_spin and _rest == 0
	while spins and _peer.get_available_bytes() < 12:
		spins = OS.get_ticks_usec() - began_us < SPIN_US
	var head = _peer.get_data(12)
	if head[0] != OK:
		return false
	_rest = int(max(_rest - 1, 0)) if OS.get_ticks_usec() - began_us < SPIN_US else REST
	var header = to_ints(head[1])
	kind = header[1] & 0xFF
	ticket = header[2]
	body = PoolByteArray()
	if header[0] > 0:
		var rest = _peer.get_data(header[0])
		if rest[0] != OK:
			return false
		body = rest[1]
	received_us = OS.get_ticks_usec()
	return true


# The body of the request, as the JSON object it is; null when it is none.
func json():
	var parsed = JSON.parse(body.get_string_from_utf8())
	return parsed.result if parsed.error == OK and parsed.result is Dictionary else null


# Answers the request.
func send(of_kind: int, bytes: PoolByteArray) -> void:
	_send(of_kind, bytes, ticket)


func send_json(of_kind: int, value: Dictionary) -> void:
	var bytes = JSON.print(plain(value)).to_utf8()
	if bytes.size() > MAX_JSON:
		of_kind = ERROR
		bytes = JSON.print(FALLBACK).to_utf8()
	_send(of_kind, bytes, ticket)


# Sends what answers no request.
func send_unasked(of_kind: int, value: Dictionary) -> void:
	var bytes = JSON.print(plain(value)).to_utf8()
	if bytes.size() <= MAX_JSON:
		_send(of_kind, bytes, 0)


func _send(of_kind: int, bytes: PoolByteArray, of_ticket: int) -> void:
	var frame = int_bytes(PoolIntArray([bytes.size(), of_kind, of_ticket]))
	frame.append_array(bytes)
	_peer.put_data(frame)


# The same value in what JSON has: vectors and arrays become lists, what is not finite or has no equal becomes null.
static func plain(value):
	match typeof(value):
		TYPE_NIL, TYPE_BOOL, TYPE_INT, TYPE_STRING:
			return value
		TYPE_REAL:
			return null if is_nan(value) or is_inf(value) else value
		TYPE_NODE_PATH:
			return str(value)
		TYPE_DICTIONARY:
			var object = {}
			for key in value:
				object[str(key)] = plain(value[key])
			return object
		TYPE_VECTOR2:
			return [plain(value.x), plain(value.y)]
		TYPE_VECTOR3:
			return [plain(value.x), plain(value.y), plain(value.z)]
		TYPE_COLOR:
			return [plain(value.r), plain(value.g), plain(value.b), plain(value.a)]
	if typeof(value) >= TYPE_ARRAY:
		var list = []
		for element in value:
			list.append(plain(element))
		return list
	return null


# The bytes of 32-bit integers.
static func int_bytes(numbers: PoolIntArray) -> PoolByteArray:
	return PoolByteArray() if numbers.size() == 0 else var2bytes(numbers).subarray(8, -1)


# The bytes of 32-bit floats.
static func float_bytes(numbers: PoolRealArray) -> PoolByteArray:
	return PoolByteArray() if numbers.size() == 0 else var2bytes(numbers).subarray(8, -1)


# The bytes of a packed array of any of the three types.
static func bytes_of(numbers) -> PoolByteArray:
	return numbers if typeof(numbers) == TYPE_RAW_ARRAY or numbers.size() == 0 else var2bytes(numbers).subarray(8, -1)


static func to_ints(bytes: PoolByteArray) -> PoolIntArray:
	return _to_array(TYPE_INT_ARRAY, bytes)


static func to_floats(bytes: PoolByteArray) -> PoolRealArray:
	return _to_array(TYPE_REAL_ARRAY, bytes)


# The bytes, padded to 4.
static func padded(bytes: PoolByteArray) -> PoolByteArray:
	while bytes.size() % 4 != 0:
		bytes.append(0)
	return bytes


# A part of an array of bytes, which may be empty.
static func part(bytes: PoolByteArray, from: int, end: int) -> PoolByteArray:
	return bytes.subarray(from, end - 1) if end > from else PoolByteArray()


static func _to_array(type: int, bytes: PoolByteArray):
	var variant = PoolByteArray([type, 0, 0, 0])
	variant.append_array(var2bytes(bytes.size() >> 2).subarray(4, 7))
	variant.append_array(bytes)
	return bytes2var(variant)
