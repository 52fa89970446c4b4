const Wire = preload("res://addons/envmanager/wire.gd")
const NAMES = {TYPE_REAL_ARRAY: "PoolRealArray", TYPE_INT_ARRAY: "PoolIntArray", TYPE_RAW_ARRAY: "PoolByteArray", TYPE_ARRAY: "list"}


# Whether an agent has the sizes of this behavior. Godot 3 compares dictionaries by identity, their hashes by content.
func fits(agent: Node) -> bool:
	return (
		agent.continuous_size == continuous_size
		and Array(agent.discrete_choices) == discrete_choices
		and agent.observations().hash() == observations.hash()
	)


func _named(type: int) -> String:
	return NAMES.get(type, "value of type %d" % type)
