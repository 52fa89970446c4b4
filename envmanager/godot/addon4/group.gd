extends RefCounted
## The agents of one behavior: what they see and do, and who they are.

const Declared := preload("res://addons/envmanager/declared.gd")
const TYPES := {"float32": TYPE_PACKED_FLOAT32_ARRAY, "int32": TYPE_PACKED_INT32_ARRAY, "uint8": TYPE_PACKED_BYTE_ARRAY}

var name := ""
var number := 0
var observations: Array = []
var types: Array = []  # of each observation: the type of its packed array
var sizes: Array = []  # of each observation: the numbers in one row
var is_one_float_array := false
var continuous_size := 0
var discrete_choices: Array = []
var max_agents := 0
var settings: Resource = null
var declared := {}  # what the settings are, and which node refers to them
var agents: Array = []
var leavers: Array = []  # their last rows
var misfits := {}  # path of a policy -> why its agents cannot act by it, or ""
var acting: Array = []  # those who get an action, in the order of the rows sent last
var some_ended := false  # an episode of some agent, since the frame before
var changed := true  # other rows than in the frame before


func _init(agent: Node, as_number: int) -> void:
	name = agent.behavior
	number = as_number
	continuous_size = agent.continuous_size
	discrete_choices = Array(agent.discrete_choices)
	observations = agent.observations()
	for spec in observations:
		var size := 1
		for length in spec["shape"]:
			size *= length
		sizes.append(size)
		types.append(TYPES.get(spec["dtype"], TYPE_NIL))
	is_one_float_array = types == [TYPE_PACKED_FLOAT32_ARRAY]


func specs() -> Dictionary:
	return {"name": name, "observations": observations, "actions": _actions()}


## Whether an agent has the sizes of this behavior.
func fits(agent: Node) -> bool:
	return (
		agent.continuous_size == continuous_size
		and Array(agent.discrete_choices) == discrete_choices
		and agent.observations() == observations
	)


## Keeps the settings that an agent refers to. Returns the end of a sentence about this behavior, or "".
func refer(agent: Node) -> String:
	if agent.settings == null or agent.settings == settings:
		return ""
	if not "trainer" in agent.settings:
		return "has settings that are no EnvManagerBehavior: those of node %s" % Declared.path_of(agent)
	var told := Declared.told_by(agent, agent.settings)
	if settings == null:
		settings = agent.settings
		declared = told
		return ""
	if told.fields.hash() == declared.fields.hash():
		return ""
	var both := [declared.node, declared.file, told.node, told.file]
	return "has two settings: node %s refers to some in %s, node %s to others in %s. Let both refer to the same" % both


## The end of a sentence about this behavior, or "".
func what_is_wrong() -> String:
	if name == "":
		return "has no name: set the field behavior of its agents"
	if continuous_size == 0 and discrete_choices.is_empty():
		return "has no actions: set continuous_size or discrete_choices"
	if sizes.is_empty() or sizes.min() <= 0:
		return "observes nothing: set observation_size"
	if types.has(TYPE_NIL):
		return "observes a dtype that is none of float32, int32, uint8"
	if max_agents == 0:
		return "is not there in the beginning: set in the arena's max_agents how many there may be"
	for agent in agents:
		if not fits(agent):
			return "has agents of several sizes; all must have the same"
	return ""


## The end of a sentence about what observe() returned, or "".
func what_is_wrong_with(parts) -> String:
	if not parts is Array or parts.size() != sizes.size():
		return "%s, not an Array of %d packed arrays" % [_what(parts), sizes.size()]
	for i in parts.size():
		if typeof(parts[i]) != types[i] or parts[i].size() != sizes[i]:
			return "%s, not a %s of %d" % [_what(parts[i]), _named(types[i]), sizes[i]]
	return ""


## The agents of some copies (by index), or all.
func rows(only: Dictionary) -> Array:
	if only.is_empty():
		return agents
	return agents.filter(func(agent: Node) -> bool: return only.has(agent._copy.index))


## u32 arena, u32 k of each row.
func ids(of_agents: Array) -> PackedByteArray:
	var pairs := PackedInt32Array()
	for agent in of_agents:
		pairs.append(agent._copy.index)
		pairs.append(agent._k)
	for leaver in leavers:
		pairs.append(leaver.arena)
		pairs.append(leaver.k)
	return pairs.to_byte_array()


func _actions() -> Array:
	var actions := []
	if continuous_size > 0:
		var shape := [continuous_size]
		actions.append({"name": "continuous", "shape": shape, "dtype": "float32", "low": -1, "high": 1})
	var high := discrete_choices.map(func(n: int) -> int: return n - 1)
	if high.size() == 1:
		actions.append({"name": "discrete", "shape": [], "dtype": "int32", "low": 0, "high": high[0]})
	elif high.size() > 1:
		actions.append({"name": "discrete", "shape": [high.size()], "dtype": "int32", "low": 0, "high": high})
	return actions


func _what(value) -> String:
	if value == null:
		return "nothing"
	if typeof(value) >= TYPE_ARRAY:
		return "a %s of %d" % [_named(typeof(value)), value.size()]
	return "a " + _named(typeof(value))


func _named(type: int) -> String:
	return type_string(type)
