extends RefCounted
## The connection to the trainer: frames of a header of 12 bytes and a body, little endian.
##
## Header: u32 length of the body, u8 kind, u8 0, u16 0, u32 ticket. Every array in a body is padded to 4 bytes.

const HELLO := 1
const SPECS := 2
const STEPS := 3
const VALUE := 4
const ERROR := 5
const BUSY := 6
const NOTE := 7
const CONFIGURE := 65
const RESET := 66
const STEP := 67
const CALL := 68
const CLOSE := 69
const BEGIN := 70

const MAX_JSON := 1048576  # bytes; the trainer refuses more
const CONNECT_MS := 10000
const SPIN_US := 500  # a wait is worth looking again for so long: waking takes some 50
const REST := 20  # after one that took longer, so many sleep: another program may want a core
const FALLBACK := {"message": "the answer is over 1 MiB", "script": null, "line": null, "function": null, "arena": null}

# The request that was received last.
var kind := 0
var ticket := 0
var body := PackedByteArray()
var received_us := 0

# Whether there is a core for each engine and the trainer, so that an engine may keep its own while it waits.
var may_spin := false

var _rest := 0
var _peer := StreamPeerTCP.new()


## Connects to "host:port"; false when nobody is there.
func connect_to(address: String) -> bool:
	var colon := address.rfind(":")
	if _peer.connect_to_host(address.left(colon), int(address.substr(colon + 1))) != OK:
		return false
	var until := Time.get_ticks_msec() + CONNECT_MS
	while _peer.get_status() == StreamPeerTCP.STATUS_CONNECTING and Time.get_ticks_msec() < until:
		OS.delay_msec(1)
		_peer.poll()
	if _peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		return false
	_peer.set_no_delay(true)
	return true


## Waits for a request; false when the trainer is gone.
func receive() -> bool:
	var began_us := Time.get_ticks_usec()
	var spins := may_spin and _rest == 0
	while spins and _peer.get_available_bytes() < 12:
		spins = Time.get_ticks_usec() - began_us < SPIN_US
	var head := _peer.get_data(12)
	if head[0] != OK:
		return false
	_rest = maxi(_rest - 1, 0) if Time.get_ticks_usec() - began_us < SPIN_US else REST
	var header: PackedByteArray = head[1]
	var length := header.decode_u32(0)
	kind = header.decode_u8(4)
	ticket = header.decode_u32(8)
	body = PackedByteArray()
	if length > 0:
		var rest := _peer.get_data(length)
		if rest[0] != OK:
			return false
		body = rest[1]
	received_us = Time.get_ticks_usec()
	return true


## The body of the request, as the JSON object it is; null when it is none.
func json():
	var value = JSON.parse_string(body.get_string_from_utf8())
	return value if value is Dictionary else null


## Answers the request (or, with another ticket, sends what belongs to none).
func send(of_kind: int, bytes: PackedByteArray, of_ticket := ticket) -> void:
	var frame := PackedByteArray()
	frame.resize(12)
	frame.encode_u32(0, bytes.size())
	frame.encode_u8(4, of_kind)
	frame.encode_u32(8, of_ticket)
	frame.append_array(bytes)
	_peer.put_data(frame)


func send_json(of_kind: int, value: Dictionary, of_ticket := ticket) -> void:
	var bytes := JSON.stringify(plain(value)).to_utf8_buffer()
	if bytes.size() <= MAX_JSON:
		send(of_kind, bytes, of_ticket)
	elif of_kind != NOTE:
		send(ERROR, JSON.stringify(FALLBACK).to_utf8_buffer(), of_ticket)


## The same value in what JSON has: vectors and arrays become lists, what is not finite or has no equal becomes null.
static func plain(value):
	match typeof(value):
		TYPE_NIL, TYPE_BOOL, TYPE_INT, TYPE_STRING:
			return value
		TYPE_FLOAT:
			return null if is_nan(value) or is_inf(value) else value
		TYPE_STRING_NAME, TYPE_NODE_PATH:
			return str(value)
		TYPE_DICTIONARY:
			var object := {}
			for key in value:
				object[str(key)] = plain(value[key])
			return object
		TYPE_VECTOR2, TYPE_VECTOR2I:
			return [plain(value.x), plain(value.y)]
		TYPE_VECTOR3, TYPE_VECTOR3I:
			return [plain(value.x), plain(value.y), plain(value.z)]
		TYPE_COLOR:
			return [plain(value.r), plain(value.g), plain(value.b), plain(value.a)]
	if typeof(value) >= TYPE_ARRAY:
		var list := []
		for element in value:
			list.append(plain(element))
		return list
	return null


## Appends bytes, padded to 4.
static func append_block(to: PackedByteArray, bytes: PackedByteArray) -> void:
	to.append_array(bytes)
	while to.size() % 4 != 0:
		to.append(0)
